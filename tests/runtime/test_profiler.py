"""The profiler trace of a step contains the step, its phases and device operations."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memsearcher_jax.runtime.profiler import StepProfiler, check_step

HERE = Path(__file__).parent


def test_a_trace_contains_the_step_its_phases_and_its_programs(tmp_path):
    command = [sys.executable, HERE / "profiled_job.py", tmp_path]
    events = json.loads(subprocess.check_output(command, cwd=HERE.parents[1], text=True))
    assert [name for name, _ in events].count("rollout") == 1
    assert [stats["step_num"] for name, stats in events if name == "train"] == [1]
    assert any(stats.get("hlo_module") == "jit_multiply" for _, stats in events)  # an operation on the device


def test_no_trace_is_written_without_a_profiled_step(tmp_path):
    with StepProfiler(tmp_path, None) as profiler:
        for step in range(2):
            profiler(step)
    assert list(tmp_path.iterdir()) == []


def test_a_profiled_step_outside_the_run_is_an_error():
    check_step(None, 3, 3)
    check_step(3, 3, 4)
    for step in (-1, 2, 6):
        with pytest.raises(ValueError, match=f"--profile {step}: this start takes the steps 3 to 5"):
            check_step(step, 3, 6)
