"""A trace of one step: that its files are there, can be read, and show steps, phases and what the device did."""

import jax
import jax.numpy as jnp
import pytest

from memsearcher_jax.rl.phases import Phases
from memsearcher_jax.rl.trace import Trace, check_step


def take_steps(trace, count):
    @jax.jit
    def multiply(x):
        return x @ x

    for step in range(count):
        trace(step)
        phases = Phases(lambda name: None)
        with phases("rollout"):
            multiply(jnp.ones((64, 64))).block_until_ready()


def events(out):
    """Names of all events of the one trace, by the file format that xprof reads."""
    (file,) = (out / "profile" / "plugins" / "profile").glob("*/*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(file))
    return [(event.name, dict(event.stats)) for plane in data.planes for line in plane.lines for event in line.events]


def test_one_step_is_traced_with_its_phases_and_programs(tmp_path):
    with Trace(tmp_path, 1) as trace:
        take_steps(trace, 3)
    found = events(tmp_path)
    names = [name for name, _ in found]
    assert names.count("rollout") == 1
    assert [stats["step_num"] for name, stats in found if name == "train"] == [1]
    assert any(stats.get("hlo_module") == "jit_multiply" for _, stats in found)  # an operation on the device


def test_without_a_step_nothing_is_written(tmp_path):
    with Trace(tmp_path, None) as trace:
        take_steps(trace, 2)
    assert list(tmp_path.iterdir()) == []


def test_the_trace_of_a_step_that_fails_is_written(tmp_path):
    with pytest.raises(ZeroDivisionError), Trace(tmp_path, 0) as trace:
        take_steps(trace, 1)
        raise ZeroDivisionError
    assert events(tmp_path)
    with Trace(tmp_path / "next", 0) as trace:  # nothing is left under way
        take_steps(trace, 1)
    assert events(tmp_path / "next")


def test_a_step_that_will_not_be_taken():
    check_step(None, 3, 3)
    check_step(3, 3, 4)
    for step in (-1, 2, 6):
        with pytest.raises(ValueError, match=f"--profile {step}: this start takes the steps 3 to 5"):
            check_step(step, 3, 6)
