"""The peak memory of an export, measured in a separate process."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import safe_open

from memsearcher_jax.launch.cli import load_preset
from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.rl import setup
from memsearcher_jax.runtime.run_dir import open_run_folder
from memsearcher_jax.training import update
from memsearcher_jax.training.checkpoint import Checkpoints

SHARD_GB = 0.2


def make_run(folder: Path, **sizes) -> dict:
    """Writes a run with a single checkpoint, from eight devices; returns its weights on the host."""
    config = load_preset("nano")
    config = replace(config, model=replace(config.model, param_dtype="bfloat16", **sizes))
    mesh = sharding.make_mesh(config.mesh)
    shardings = sharding.param_shardings(config.model, mesh)
    params = jax.jit(lambda key: qwen.init(key, config.model), out_shardings=shardings)(jax.random.key(0))
    open_run_folder(folder, config, setup.PACKAGED_TOKENIZER)
    state = update.TrainState(jax.numpy.int32(0), params, ())
    with Checkpoints(folder / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, state, config.model, {"position": 0})
    return jax.device_get(params)


@pytest.mark.slow
def test_an_export_needs_less_memory_than_two_shards(tmp_path):
    make_run(tmp_path / "small")
    params = make_run(tmp_path / "large", embed_size=1_024, ffn_size=8_192, layers=16)
    root, command = Path(__file__).parents[2], [sys.executable, __file__]
    for name in ("small", "large"):
        flags = ["--checkpoint", tmp_path / name, "--out", tmp_path / f"{name}-hf", "--shard_gb", SHARD_GB]
        command.append(json.dumps([*map(str, flags), "--dtype", "bfloat16"]))
    environment = {"PYTHONPATH": f"{root}:{root / 'launch'}", "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout.splitlines()[-1])

    files = sorted((tmp_path / "large-hf").glob("model-*.safetensors"))
    largest = max(file.stat().st_size for file in files)
    assert len(files) > 3 and largest > 0.8 * SHARD_GB * 1e9
    assert (after - before) * 1024 < 1.3 * largest
    name, weight = "model.layers.15.mlp.down_proj.weight", np.asarray(params["layers"]["down"][15])
    index = json.loads((tmp_path / "large-hf" / "model.safetensors.index.json").read_text())
    with safe_open(tmp_path / "large-hf" / index["weight_map"][name], framework="numpy") as tensors:
        assert tensors.get_tensor(name).tobytes() == weight.tobytes()


if __name__ == "__main__":
    from memsearcher_jax.launch import export_hf

    def memory(name: str) -> int:
        """Kilobytes. Not ru_maxrss, which a process inherits from its parent."""
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1])

    export_hf.main(json.loads(sys.argv[1]))  # loads all code
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = memory("VmRSS")
    export_hf.main(json.loads(sys.argv[2]))
    print(json.dumps([before, memory("VmHWM")]))
