"""Memory, link traffic and time of full-size runs, as compiled for TPUs without one.

Each plan runs in a separate process, because libtpu rejects the XLA flags of the tests.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tpu_compile
PLAN = Path(__file__).resolve().parents[2] / "launch" / "plan_tpu.py"
GB = 1e9
# Few slots and no reference, for plans of the update alone.
ALONE = ("--what", "update", "--sampling.slots", "4", "--sampling.kv_tokens", "0", "--training.kl_coefficient", "0")
PARAMS_7B, PARAMS_3B = 7_615_616_512, 3_085_938_688


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Plans a run, once for each set of flags, and returns the plan."""
    pytest.importorskip("libtpu", reason="no TPU compiler: install the extra 'tpu'")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}

    @functools.cache
    def plan(config: str, topology: str, *flags: str) -> dict:
        file = tmp_path_factory.mktemp("plan") / "plan.json"
        command = [sys.executable, PLAN, "--config", config, "--topology", topology, "--json", file, *flags]
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert process.returncode == 0, process.stdout + process.stderr
        return json.loads(file.read_text())

    return plan


@pytest.fixture
def update(plan):
    """(preset, topology, devices, rows per device, flags) -> the program of the update with one micro-batch."""

    def update(config: str, topology: str, devices: int, rows: int, *flags: str) -> dict:
        rows_flags = "--training.minibatch_rows", str(devices * rows), "--training.grad_accum_steps", "1"
        (program,) = plan(config, topology, *ALONE, *rows_flags, *flags)["programs"]
        return program

    return update


def test_a_step_of_7b_on_v6e_4x8(plan):
    """Seconds at full rates of the paper's settings, with carried trajectories in the slots that a step does not fill.

    Everything that a phase holds takes at most 24 GB.
    """
    step = plan("qwen7b", "v6e:4x8", "--rl.carry_over", "2")
    phases = {phase["name"]: phase for phase in step["roofline"]["phases"]}
    assert phases["update"]["seconds"] <= 8.3 and phases["reference"]["seconds"] <= 2.2
    assert phases["decode"]["seconds"] <= 2.8
    assert sum(max(phase["compute"], phase["memory"], phase["links"]) for phase in phases.values()) <= 14.0
    assert max(program["total_bytes"] for program in step["programs"]) <= 24 * GB


def test_7b_fits_v5e_4x8(plan):
    """With KL, and 256 slots in the memory of 64 complete contexts. The update takes at most 12 GB, including the
    optimizer state, and sends 43 GB per micro-batch."""
    step = plan("qwen7b", "v5e:4x8", "--model.remat", "nothing_saveable")
    (program,) = (program for program in step["programs"] if program["name"] == "update")
    assert program["peak_bytes"] <= 12 * GB
    assert program["sent_bytes"] <= 43 * GB
    assert_state_is_donated(program, PARAMS_7B / 32)
    # Detects changes that double the compile time, as a sort once did.
    assert program["compile_cpu_seconds"] <= 200


def test_7b_on_v5e_4x4(update):
    """The update fits sixteen chips with 15.75 GiB each."""
    program = update("qwen7b", "v5e:4x4", 16, 1, "--model.remat", "nothing_saveable")
    assert program["peak_bytes"] <= 12.9 * GB
    assert_state_is_donated(program, PARAMS_7B / 16)


def test_7b_on_v5p_2x2x4_with_two_rows(update):
    program = update("qwen7b", "v5p:2x2x4", 16, 2, "--model.remat", "nothing_saveable")
    assert program["peak_bytes"] <= 23 * GB
    assert_state_is_donated(program, PARAMS_7B / 16)


def test_3b_on_v5e_4x8(update):
    program = update("qwen3b", "v5e:4x8", 32, 1, "--model.remat", "nothing_saveable")
    assert program["peak_bytes"] <= 4.4 * GB
    assert_state_is_donated(program, PARAMS_3B / 32)


def test_3b_fits_v5e_4x4(plan):
    assert max(program["total_bytes"] for program in plan("qwen3b", "v5e:4x4")["programs"]) <= 11.5 * GB


def test_7b_with_lora_fits_one_host_of_v5e(plan, tmp_path):
    """Training with KL, and what a rollout holds. A host of v6e has twice the memory."""
    lora = "--model.lora_rank", "16", "--model.path", str(tmp_path), "--model.remat", "nothing_saveable"
    step = plan("qwen7b", "v5e:2x4", "--what", "update", "--rows", "1", *lora)
    assert {program["name"] for program in step["programs"]} == {"update", "reference"}
    assert max(program["total_bytes"] for program in step["programs"]) <= 10 * GB
    assert step["resident"]["rollout"] <= 14 * GB


def assert_state_is_donated(program: dict, parameters: float) -> None:
    """The state has the weights and both moments, in float32."""
    assert program["donated_bytes"] >= 0.99 * 3 * 4 * parameters
