"""The profiler trace of a step: its files are readable and contain steps, phases and device operations."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from memsearcher_jax.runtime.profiler import StepProfiler, check_step

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """The folder with the traces of `profiled_job.py`."""
    out = tmp_path_factory.mktemp("traces")
    subprocess.run([sys.executable, HERE / "profiled_job.py", out], cwd=HERE.parents[1], check=True)
    return out


def events(out):
    """Names and statistics of all events in the trace, which has the file format of xprof."""
    (file,) = (out / "profile" / "plugins" / "profile").glob("*/*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(file))
    return [(event.name, dict(event.stats)) for plane in data.planes for line in plane.lines for event in line.events]


def test_a_trace_contains_the_step_its_phases_and_its_programs(traces):
    recorded = events(traces / "single_step")
    names = [name for name, _ in recorded]
    assert names.count("rollout") == 1
    assert [stats["step_num"] for name, stats in recorded if name == "train"] == [1]
    assert any(stats.get("hlo_module") == "jit_multiply" for _, stats in recorded)  # an operation on the device


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
