"""Logs of trajectories: readable after a kill at any byte, as a log and, once it is clean, as any file."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.trajectories import append_trajectory, clean_log, compress_trajectories, read_trajectories
from memsearcher_jax.types import Turn
from tests import samples


def scored(number):
    return samples.scored(turns=(Turn("", f"reply {number} \ud800 é"),), id=f"q{number}")


def write(path, numbers):
    with path.open("ab") as log:
        for number in numbers:
            append_trajectory(log, scored(number))


def keep_all(one):
    return True


@pytest.fixture
def log(tmp_path):
    return tmp_path / "host_0000.jsonl.gz"


def test_a_file_cut_at_any_byte_keeps_its_complete_trajectories_and_accepts_more(log):
    write(log, [0])
    first = log.stat().st_size
    write(log, [1])
    both = log.read_bytes()
    for size in range(len(both) + 1):
        log.write_bytes(both[:size])
        found = list(read_trajectories(log, log=True))
        assert found == [scored(number) for number in range(len(found))]
        # The checksum after a line may be cut off: the line itself is complete.
        assert len(found) - sum(size >= end for end in (first, len(both))) in (0, int(size < len(both)))
        clean_log(log, keep_all)
        assert log.read_bytes() == both[: [0, first, len(both)][len(found)]]
        write(log, [7])
        assert list(read_trajectories(log)) == [*found, scored(7)]


def test_trajectories_that_are_not_to_be_kept_are_removed_and_a_complete_file_is_not_touched(log):
    atomic_write(log, compress_trajectories(map(scored, range(50))))  # one member, as training writes it
    before = log.read_bytes()
    clean_log(log, keep_all)
    assert log.read_bytes() == before
    clean_log(log, lambda one: one != scored(7))
    assert [one.trajectory.problem.id for one in read_trajectories(log, log=True)] == [
        f"q{n}" for n in range(50) if n != 7
    ]


def test_damage_before_the_end_raises_and_removes_nothing(log):
    write(log, range(3))
    damaged = bytearray(log.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    log.write_bytes(damaged)
    for use in (lambda: list(read_trajectories(log, log=True)), lambda: clean_log(log, keep_all)):
        with pytest.raises(ValueError, match=r"host_0000.jsonl.gz: compressed data is damaged after line 1"):
            use()
    assert log.read_bytes() == damaged


def test_one_byte_that_begins_no_member_is_damage(log):
    write(log, range(2))
    log.write_bytes(log.read_bytes() + b"x")
    with pytest.raises(ValueError, match="compressed data is damaged after line 2"):
        list(read_trajectories(log, log=True))
    damaged = bytearray(log.read_bytes()[:-1] + b"\x1f")
    damaged[0] = 0
    log.write_bytes(damaged)
    with pytest.raises(ValueError, match="compressed data is damaged after line 0"):
        list(read_trajectories(log, log=True))


def test_a_killed_process_loses_no_appended_trajectory(log):
    program = f"""
        import sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from pathlib import Path
        from test_trajectory_log import append_trajectory, scored
        with Path({str(log)!r}).open("ab") as log:
            for number in range(10**9):
                append_trajectory(log, scored(number))
                print(number, flush=True)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line == "20\n":
                os.kill(process.pid, signal.SIGKILL)
                break
        printed = int((process.stdout.read().split() or ["20"])[-1])
    kept = list(read_trajectories(log, log=True))
    assert kept == [scored(number) for number in range(len(kept))]
    assert len(kept) >= printed + 1
