"""The profiler trace of a step contains the step, its phases and device operations.

As a program this file writes a profile of the second of three steps into a folder, and prints the events in it: [name,
statistics]. Traces crash a process that has loaded as many libraries as the test run.
"""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from memsearcher_jax.runtime.profiler import StepProfiler, check_step
from memsearcher_jax.runtime.timing import Timer


def main(out: Path) -> None:
    multiply = jax.jit(jnp.dot)
    with StepProfiler(out, 1) as profiler:
        for step in range(3):
            profiler(step)
            with Timer()("rollout"):
                multiply(jnp.ones((64, 64)), jnp.ones((64, 64))).block_until_ready()
    (file,) = (out / "profile" / "plugins" / "profile").glob("*/*.xplane.pb")  # the format of xprof
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    events = [(event.name, dict(event.stats)) for plane in planes for line in plane.lines for event in line.events]
    print(json.dumps(events, default=str))


def test_a_trace_contains_the_step_its_phases_and_its_programs(tmp_path):
    command = [sys.executable, __file__, tmp_path]
    events = json.loads(subprocess.check_output(command, cwd=Path(__file__).parents[2], text=True))
    assert [name for name, _ in events].count("rollout") == 1
    assert [stats["step_num"] for name, stats in events if name == "train"] == [1]
    assert any(stats.get("hlo_module") == "jit_dot" for _, stats in events)  # an operation on the device


def test_no_trace_is_written_without_a_profiled_step(tmp_path):
    with StepProfiler(tmp_path, None) as profiler:
        profiler(0)
    assert list(tmp_path.iterdir()) == []


def test_a_profiled_step_outside_the_run_is_an_error():
    check_step(None, 3, 3)
    check_step(3, 3, 4)
    for step in (-1, 2, 6):
        with pytest.raises(ValueError, match=f"--profile {step}: this start takes the steps 3 to 5"):
            check_step(step, 3, 6)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
