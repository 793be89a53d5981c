"""benchmarks/host.py on few slots: what it measures of the host and of simulated devices."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "host.py"


def run(*flags):
    """(milliseconds of the host for a trajectory, share of the time in which devices had no work) and the output."""
    words = [sys.executable, BENCHMARK, "--clock", "cpu", "--no-profile", *flags]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def idle_share(output):
    return float(re.search(r"devices without work ([\d.]+)%", output)[1]) / 100


@pytest.mark.slow
@pytest.mark.parametrize("workflow", ["memsearcher", "react", "memalpha", "memagent"])
def test_every_script_is_played_to_its_end(workflow):
    output = run("--trajectories", "40", "--slots", "16", "--workflow", workflow)
    ended = "stream_read" if workflow == "memalpha" else "answered"
    assert f"{workflow}, 40 trajectories of" in output and output.splitlines()[0].endswith(f"ended by: {ended}")


@pytest.mark.slow
def test_devices_wait_less_for_a_host_with_two_calls_in_flight():
    flags = ("--trajectories", "80", "--slots", "64")
    ahead, turns = idle_share(run(*flags)), idle_share(run(*flags, "--async_scheduling", "off"))
    assert 0 <= ahead < turns / 2


@pytest.mark.slow
def test_what_lies_between_rollout_and_update_is_measured():
    output = run("--trajectories", "40", "--slots", "32", "--between")
    before, _, during = output.partition("while the devices train:\n")
    names = [line.split(maxsplit=1)[1] for line in before.splitlines()[1:]]
    assert names[:2] == ["rewards", "advantages"]
    assert names[-3:] == ["rows", "arrays of the first mini-batch", "together"]
    assert during.splitlines()[-1].endswith("compression of trajectories")
