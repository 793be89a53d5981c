"""An export of a run copies one tensor at a time, so that weights larger than the memory can be exported."""

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
from memsearcher_jax.runs.run_dir import PACKAGED_TOKENIZER, open_run_folder
from memsearcher_jax.training import update
from memsearcher_jax.training.checkpoint import Checkpoints

# Exports twice; prints the memory before the second export and its peak during it, in kilobytes.
EXPORTS = """
import json, sys
from pathlib import Path
from memsearcher_jax.launch import export_hf

def memory(name):  # not ru_maxrss, which a process inherits from its parent
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1])

export_hf.main(json.loads(sys.argv[1]))  # loads all code
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = memory("VmRSS")
export_hf.main(json.loads(sys.argv[2]))
print(json.dumps([before, memory("VmHWM")]))
"""


def make_run(folder: Path, **sizes: int) -> dict:
    """Writes a run with a single checkpoint; returns its weights on the host."""
    config = load_preset("nano")
    config = replace(config, model=replace(config.model, param_dtype="bfloat16", **sizes))
    mesh = sharding.make_mesh(config.mesh)
    shardings = sharding.param_shardings(config.model, mesh)
    params = jax.jit(lambda key: qwen.init(key, config.model), out_shardings=shardings)(jax.random.key(0))
    open_run_folder(folder, config, PACKAGED_TOKENIZER)
    state = update.TrainState(jax.numpy.int32(0), params, ())
    with Checkpoints(folder / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, state, config.model, {"position": 0})
    return jax.device_get(params)


@pytest.mark.slow
def test_an_export_needs_a_fraction_of_the_memory_of_the_weights(tmp_path):
    make_run(tmp_path / "small")
    params = make_run(tmp_path / "large", embed_size=512, ffn_size=4_096, layers=16)
    command = [sys.executable, "-c", EXPORTS]
    for name in ("small", "large"):
        flags = ["--checkpoint", tmp_path / name, "--out", tmp_path / f"{name}-hf", "--dtype", "bfloat16"]
        command.append(json.dumps([str(flag) for flag in flags]))
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    before, peak = json.loads(done.stdout.splitlines()[-1])

    (file,) = (tmp_path / "large-hf").glob("*.safetensors")
    assert file.stat().st_size > 200e6
    assert (peak - before) * 1024 < 0.5 * file.stat().st_size
    with safe_open(file, framework="numpy") as tensors:
        exported = tensors.get_tensor("model.layers.15.mlp.down_proj.weight")
    assert exported.tobytes() == np.asarray(params["layers"]["down"][15]).tobytes()
