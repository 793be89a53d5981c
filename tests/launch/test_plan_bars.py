"""Memory, link traffic and time of full-size runs, as compiled for TPUs without one.

Each plan runs in a separate process, because libtpu rejects the XLA flags of the tests.
"""

import json
import os
import subprocess
import sys

import pytest

from memsearcher_jax.launch import plan_tpu

pytestmark = pytest.mark.tpu_compile
GB = 1e9
PARAMS_7B, PARAMS_3B = 7_615_616_512, 3_085_938_688
NO_REMAT = "--model.remat nothing_saveable"
# Without a reference, and with few slots.
ALONE = "--what update --sampling.slots 4 --sampling.kv_tokens 0 --training.kl_coefficient 0"
MICRO = "--training.grad_accum_steps 1 --training.minibatch_rows"


@pytest.fixture
def plan(tmp_path):
    """Plans a run and returns the plan."""
    pytest.importorskip("libtpu", reason="no TPU compiler: install the extra 'tpu'")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}

    def plan(flags: str) -> dict:
        file = tmp_path / "plan.json"
        command = [sys.executable, plan_tpu.__file__, *flags.split(), "--json", file]
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert process.returncode == 0, process.stdout + process.stderr
        return json.loads(file.read_text())

    return plan


def test_a_step_of_7b_on_v6e_4x8(plan):
    """Seconds at full rates of the paper's settings, with carried trajectories in the slots that a step does not fill.

    Everything that a phase holds takes at most 24 GB.
    """
    step = plan("--config qwen7b --topology v6e:4x8 --rl.carry_over 2")
    phases = {phase["name"]: phase for phase in step["roofline"]["phases"]}
    assert phases["update"]["seconds"] <= 8.3 and phases["reference"]["seconds"] <= 2.2
    assert phases["decode"]["seconds"] <= 2.8
    assert sum(max(phase["compute"], phase["memory"], phase["links"]) for phase in phases.values()) <= 14.0
    assert max(program["total_bytes"] for program in step["programs"]) <= 24 * GB


@pytest.mark.parametrize(
    ("flags", "peak", "parameters"),
    [
        ("--config qwen7b --topology v5e:4x8", 12 * GB, PARAMS_7B / 32),  # with KL, and 256 slots
        (f"--config qwen7b --topology v5e:4x4 {ALONE} {MICRO} 16", 12.9 * GB, PARAMS_7B / 16),
        (f"--config qwen7b --topology v5p:2x2x4 {ALONE} {MICRO} 32", 23 * GB, PARAMS_7B / 16),
        (f"--config qwen3b --topology v5e:4x8 {ALONE} {MICRO} 32", 4.4 * GB, PARAMS_3B / 32),
    ],
)
def test_the_peak_of_an_update_which_donates_its_state(flags, peak, parameters, plan):
    """The state has the weights and both moments, in float32."""
    (program, *_) = plan(f"{flags} {NO_REMAT}")["programs"]
    assert program["name"] == "update" and program["peak_bytes"] <= peak
    assert program["donated_bytes"] >= 0.99 * 3 * 4 * parameters
    assert program["sent_bytes"] <= 43 * GB


def test_7b_with_lora_fits_one_host_of_v5e(plan, tmp_path):
    """Training with KL, and what a rollout holds. A host of v6e has twice the memory."""
    lora = f"--model.lora_rank 16 --model.path {tmp_path} {NO_REMAT}"
    step = plan(f"--config qwen7b --topology v5e:2x4 --what update --rows 1 {lora}")
    assert {program["name"] for program in step["programs"]} == {"update", "reference"}
    assert max(program["total_bytes"] for program in step["programs"]) <= 10 * GB
    assert step["resident"]["rollout"] <= 14 * GB
