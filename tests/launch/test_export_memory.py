"""An export of weights that would not fit: what it holds at one time, measured in a process of its own."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from cli import load_preset
from safetensors import safe_open

from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.rl import build
from memsearcher_jax.rl.run_folder import open_run_folder
from memsearcher_jax.training import update
from memsearcher_jax.training.checkpoint import Checkpoints

SHARD_GB = 0.2


def make_run(folder: Path, **sizes) -> dict:
    """A run that has done nothing but save, on eight devices; its weights, on the host."""
    config = load_preset("nano")
    config = replace(config, model=replace(config.model, param_dtype="bfloat16", **sizes))
    mesh = sharding.make_mesh(config.mesh)
    shardings = sharding.param_shardings(config.model, mesh)
    params = jax.jit(lambda key: qwen.init(key, config.model), out_shardings=shardings)(jax.random.key(0))
    open_run_folder(folder, config, build.PACKAGED_TOKENIZER)
    state = update.TrainState(jax.numpy.int32(0), params, ())
    with Checkpoints(folder / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, state, config.model, {"position": 0})
    return jax.device_get(params)


@pytest.mark.slow
def test_an_export_holds_less_than_a_file(tmp_path):
    make_run(tmp_path / "little")
    params = make_run(tmp_path / "large", embed_size=1_024, ffn_size=8_192, layers=16)
    exports = [
        ["--checkpoint", str(tmp_path / name), "--out", str(tmp_path / f"{name}-hf"), "--shard_gb", str(SHARD_GB)]
        for name in ("little", "large")
    ]
    script, root = Path(__file__), Path(__file__).parents[2]
    path = f"{root}:{root / 'launch'}"
    words = [sys.executable, script, *(json.dumps([*words, "--dtype", "bfloat16"]) for words in exports)]
    environment = {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout.splitlines()[-1])

    files = sorted((tmp_path / "large-hf").glob("model-*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    assert len(files) > 3
    assert max(sizes) > 0.8 * SHARD_GB * 1e9
    taken = (after - before) * 1024
    print(f"{sum(sizes) / 1e6:.0f} MB in files of up to {max(sizes) / 1e6:.0f} MB: {taken / 1e6:.0f} MB more memory")
    assert taken < 1.3 * max(sizes)
    for file in files:
        with safe_open(file, framework="numpy") as tensors:
            if (name := "model.layers.15.mlp.down_proj.weight") in tensors.keys():  # noqa: SIM118
                ours = np.asarray(params["layers"]["down"][15])
                assert tensors.get_tensor(name).tobytes() == ours.tobytes()
                return
    pytest.fail("the last layer is missing")


if __name__ == "__main__":
    import export_hf

    def memory(name: str) -> int:
        """Kilobytes. Not ru_maxrss, which a process inherits from the one that started it."""
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1])

    export_hf.main(json.loads(sys.argv[1]))  # brings all code into memory
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    export_hf.main(json.loads(sys.argv[2]))
    print(json.dumps([before, memory("VmHWM")]))
