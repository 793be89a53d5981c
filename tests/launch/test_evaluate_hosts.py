"""An evaluation by two processes of two devices each, connected by jax.distributed like the hosts of a slice."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys

import pytest

from memsearcher_jax.hosts import preemption
from memsearcher_jax.hosts.distributed import Hosts
from memsearcher_jax.launch import evaluate
from memsearcher_jax.logs.trajectories import read_trajectories

FLAGS = "--config tiny --evaluation.max_questions 12 --retrieval.index_type exact"
GLOO_OUTPUT = r"\[Gloo\]|connected to \d+ peer ranks|connected peer ranks"
HOST_FILES = ("host_0000.jsonl.gz", "host_0001.jsonl.gz")


def start_hosts(count, arguments):
    """Runs processes with two devices each, which must succeed; returns their (stdout, stderr)."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"}
    hosts = []
    for host in range(count):
        if count > 1:
            environment |= {preemption.ADDRESS: address, preemption.COUNT: str(count), preemption.INDEX: str(host)}
        command = [sys.executable, evaluate.__file__, *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        hosts.append(subprocess.Popen(command, env=environment, text=True, **pipes))
    try:
        outputs = [host.communicate(timeout=300) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0] * count, outputs
    return outputs


def answers(folder):
    """The file name and the replies of each question."""
    return {
        scored.trajectory.problem.id: (file.name, [turn.reply for turn in scored.trajectory.outcome.turns])
        for file in sorted((folder / "trajectories").iterdir())
        for scored in read_trajectories(file)
    }


@pytest.mark.slow
def test_hosts_of_a_slice_share_the_questions_and_host_0_writes_the_results(tmp_path, fast_compile):
    alone, together = tmp_path / "alone", tmp_path / "together"
    start_hosts(1, [*FLAGS.split(), "--out", alone])
    outputs = start_hosts(2, [*FLAGS.split(), "--out", together, "--json", tmp_path / "x.json"])
    assert "12 questions answered by" in outputs[0][0]
    # Gloo's threads write a line in several pieces, so its prefix may be torn off.
    assert [line for line in outputs[1][0].splitlines() if line and not re.search(GLOO_OUTPUT, line)] == []
    assert "host 1: evaluate 6/6" in outputs[1][1]

    expected, shared = answers(alone), answers(together)
    assert {id: shared[id][1] for id in shared} == {id: expected[id][1] for id in expected}
    assert sorted(file for file, _ in shared.values()) == [HOST_FILES[0]] * 6 + [HOST_FILES[1]] * 6
    result = json.loads((together / "results.json").read_text())
    assert result == json.loads((alone / "results.json").read_text()) == json.loads((tmp_path / "x.json").read_text())

    # Only the second host has questions left; the first host still takes part in loading the weights.
    file = together / "trajectories" / HOST_FILES[1]
    file.write_bytes(file.read_bytes()[:-7])
    (together / "results.json").unlink()
    outputs = start_hosts(2, ["--resume", "--out", together])
    assert not re.search(r"host 0: evaluate", outputs[0][1])
    assert answers(together) == shared
    assert json.loads((together / "results.json").read_text()) == result


def test_hosts_need_a_directory_in_common(refused, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preemption, "joined", lambda **options: contextlib.nullcontext(Hosts(0, 2)))
    line = "--out is missing: give one directory that all 2 hosts write to"
    assert line in refused(evaluate.main, ["--config", "tiny"])
    assert not list(tmp_path.iterdir())
