"""A trace of one step: that its files are there, can be read, and show steps, phases and what the device did."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from memsearcher_jax.rl.trace import Trace, check_step

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """The folder in which `traced.py` has traced."""
    out = tmp_path_factory.mktemp("traces")
    subprocess.run([sys.executable, HERE / "traced.py", out], cwd=HERE.parents[1], check=True)
    return out


def events(out):
    """Names of all events of the one trace, by the file format that xprof reads."""
    (file,) = (out / "profile" / "plugins" / "profile").glob("*/*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(file))
    return [(event.name, dict(event.stats)) for plane in data.planes for line in plane.lines for event in line.events]


def test_one_step_is_traced_with_its_phases_and_programs(traces):
    found = events(traces / "one")
    names = [name for name, _ in found]
    assert names.count("rollout") == 1
    assert [stats["step_num"] for name, stats in found if name == "train"] == [1]
    assert any(stats.get("hlo_module") == "jit_multiply" for _, stats in found)  # an operation on the device


def test_without_a_step_nothing_is_written(tmp_path):
    with Trace(tmp_path, None) as trace:
        for step in range(2):
            trace(step)
    assert list(tmp_path.iterdir()) == []


def test_the_trace_of_a_step_that_fails_is_written_and_nothing_is_left_under_way(traces):
    assert events(traces / "fails")
    assert events(traces / "next")


def test_a_step_that_will_not_be_taken():
    check_step(None, 3, 3)
    check_step(3, 3, 4)
    for step in (-1, 2, 6):
        with pytest.raises(ValueError, match=f"--profile {step}: this start takes the steps 3 to 5"):
            check_step(step, 3, 6)
