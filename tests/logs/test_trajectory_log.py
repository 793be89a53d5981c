"""Logs of trajectories: readable after a kill at any byte, by `read_log` and by `read_trajectories`."""

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.trajectories import (
    append_trajectory,
    compress_trajectories,
    open_log,
    read_log,
    read_trajectories,
    truncate_incomplete,
)
from memsearcher_jax.types import Turn
from tests import samples


def scored(number):
    return samples.scored(turns=(Turn("", f"reply {number} \ud800 é"),), id=f"q{number}")


def write(path, numbers):
    with open_log(path) as log:
        for number in numbers:
            append_trajectory(log, scored(number))


@pytest.fixture
def log(tmp_path):
    return tmp_path / "trajectories" / "host_0000.jsonl.gz"


def test_a_file_cut_at_any_byte_keeps_its_complete_trajectories_and_accepts_more(log):
    write(log, [0])
    first = log.stat().st_size
    write(log, [1])
    both = log.read_bytes()
    for size in range(len(both) + 1):
        log.write_bytes(both[:size])
        whole = 2 if size == len(both) else int(size >= first)
        assert list(read_log(log)) == [scored(number) for number in range(whole)]
        truncate_incomplete(log)
        assert log.stat().st_size == [0, first, len(both)][whole]
        write(log, [7])
        assert list(read_trajectories(log)) == [*map(scored, range(whole)), scored(7)]


def test_a_complete_file_is_not_truncated(log):
    truncate_incomplete(log)
    assert not log.exists()
    atomic_write(log, compress_trajectories(map(scored, range(50))))  # one member, as training writes it
    before = log.read_bytes()
    truncate_incomplete(log)
    assert log.read_bytes() == before and len(list(read_trajectories(log))) == 50


def test_damage_before_the_end_raises_and_truncates_nothing(log):
    write(log, range(3))
    damaged = bytearray(log.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    log.write_bytes(damaged)
    for use in (lambda: list(read_log(log)), lambda: open_log(log)):
        with pytest.raises(ValueError, match=r"host_0000.jsonl.gz: compressed data is damaged .*move"):
            use()
    assert log.read_bytes() == damaged


def test_trajectories_longer_than_the_read_buffer(log):
    noise = os.urandom(1 << 20).hex()  # compresses to more than one chunk
    long = scored(0)
    long = replace(long, trajectory=replace(long.trajectory, transcript=noise * 2))
    with open_log(log) as one:
        for _ in range(3):
            append_trajectory(one, long)
    assert list(read_log(log)) == [long] * 3


def test_a_killed_process_loses_no_appended_trajectory(log):
    program = f"""
        import sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from pathlib import Path
        from test_trajectory_log import append_trajectory, open_log, scored
        with open_log(Path({str(log)!r})) as log:
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
    kept = list(read_log(log))
    assert kept == [scored(number) for number in range(len(kept))]
    assert len(kept) >= printed + 1
