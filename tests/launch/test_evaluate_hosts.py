"""An evaluation by two processes of two devices that form one machine for JAX, as the hosts of a slice do."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys

import evaluate
import host
import pytest

from memsearcher_jax.report.trajectories import read_trajectories
from memsearcher_jax.rl.hosts import Hosts

FRESH = "--config tiny --evaluation.questions 12 --retrieval.kind exact"
PARTS = ("part_0000.jsonl.gz", "part_0001.jsonl.gz")


def start_hosts(count, words):
    """The processes' statuses and what they said. Each has two devices."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    hosts = [
        subprocess.Popen(
            [sys.executable, evaluate.__file__, *words],
            env=os.environ
            | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
            | ({host.ADDRESS: address, host.COUNT: str(count), host.INDEX: str(process)} if count > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(count)
    ]
    try:
        said = [one.communicate(timeout=300) for one in hosts]
    finally:
        for one in hosts:
            one.kill()
    return [one.returncode for one in hosts], said


def answers(folder):
    """By question, in which file it stands and what was said."""
    return {
        one.trajectory.problem.id: (part.name, [turn.reply for turn in one.trajectory.outcome.turns])
        for part in sorted((folder / "trajectories").iterdir())
        for one in read_trajectories(part)
    }


@pytest.mark.slow
def test_hosts_of_a_slice_share_the_questions_and_the_first_one_concludes(tmp_path, quick_to_compile):
    alone, together = tmp_path / "alone", tmp_path / "together"
    statuses, _ = start_hosts(1, [*FRESH.split(), "--out", str(alone)])
    assert statuses == [0]
    statuses, said = start_hosts(2, [*FRESH.split(), "--out", str(together), "--json", str(tmp_path / "x.json")])
    assert statuses == [0, 0], said
    assert "12 questions answered by" in said[0][0]
    assert [line for line in said[1][0].splitlines() if not line.startswith("[Gloo]")] == []
    assert "host 1: evaluate 6/6" in said[1][1]

    expected, found = answers(alone), answers(together)
    assert {id: said for id, (_, said) in found.items()} == {id: one for id, (_, one) in expected.items()}
    assert sorted(part for part, _ in found.values()) == [PARTS[0]] * 6 + [PARTS[1]] * 6
    result = json.loads((together / "results.json").read_text())
    assert result == json.loads((alone / "results.json").read_text()) == json.loads((tmp_path / "x.json").read_text())

    # Only the second host has something left to ask; the first one helps to load the weights all the same.
    part = together / "trajectories" / PARTS[1]
    before = part.read_bytes()
    part.write_bytes(before[:-7])
    (together / "results.json").unlink()
    statuses, said = start_hosts(2, ["--resume", "--out", str(together)])
    assert statuses == [0, 0], said
    assert not re.search(r"host 0: evaluate", said[0][1])
    assert answers(together) == found
    assert json.loads((together / "results.json").read_text()) == result


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--share", "1/2", "--out", "x"], "--share: these 2 hosts know of each other and share the questions"),
        (["--sweep", "seed=1,2", "--out", "x"], "--sweep runs on one host, and these are 2"),
        ([], "--out is missing: name the one folder that all 2 hosts write to"),
    ],
)
def test_what_hosts_cannot_do_together_is_refused(flags, line, refused, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host, "joined", lambda stops: contextlib.nullcontext(Hosts(0, 2)))
    assert line in refused(evaluate.main, ["--config", "tiny", *flags])
    assert not list(tmp_path.iterdir())
