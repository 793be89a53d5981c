"""The log of trajectories: whole after a kill at any byte, readable by the reader of every other file."""

import gzip
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

from memsearcher_jax.agent.types import Context, Outcome, Problem, Stop, Trajectory, Turn
from memsearcher_jax.report.trajectories import Scored, read_trajectories, write_trajectories
from memsearcher_jax.report.trajectory_log import TrajectoryLog, cut_torn_end, read_log


def scored(number):
    outcome = Outcome(Stop.ANSWERED, "Ada", (Turn("", f"reply {number} \ud800 é"),))
    context = Context((1, number), (0.0, -0.5), (False, True))
    return Scored(Trajectory(Problem(f"q{number}", "Who?", ("Ada",)), 0, outcome, (context,), "text"), 1.0)


def write(path, numbers):
    with TrajectoryLog(path) as log:
        for number in numbers:
            log.append(scored(number))


@pytest.fixture
def log(tmp_path):
    return tmp_path / "trajectories" / "part_0000.jsonl.gz"


def test_what_is_appended_is_read_by_every_reader(log):
    write(log, range(2))
    write(log, range(2, 5))
    assert list(read_log(log)) == list(read_trajectories(log)) == [scored(number) for number in range(5)]


def test_a_trajectory_can_be_read_as_soon_as_it_is_appended(log):
    with TrajectoryLog(log) as one:
        for number in range(3):
            one.append(scored(number))
            assert len(list(read_log(log))) == number + 1


def test_killed_at_any_byte_it_keeps_every_whole_trajectory_and_goes_on(log):
    write(log, [0])
    first = log.stat().st_size
    write(log, [1])
    both = log.read_bytes()
    for size in range(len(both) + 1):
        log.write_bytes(both[:size])
        whole = 2 if size == len(both) else int(size >= first)
        assert list(read_log(log)) == [scored(number) for number in range(whole)]
        assert cut_torn_end(log) == size - [0, first, len(both)][whole]
        write(log, [7])
        assert list(read_trajectories(log)) == [*map(scored, range(whole)), scored(7)]


def test_nothing_is_cut_off_what_is_whole(log, tmp_path):
    assert cut_torn_end(log) == 0
    write_trajectories(log, map(scored, range(50)))  # one member, as training writes it
    before = log.read_bytes()
    assert cut_torn_end(log) == 0
    assert log.read_bytes() == before
    assert len(list(read_trajectories(log))) == 50


def test_damage_before_the_end_is_named_and_nothing_is_cut_off(log):
    write(log, range(3))
    spoilt = bytearray(log.read_bytes())
    spoilt[len(spoilt) // 2] ^= 0xFF
    log.write_bytes(spoilt)
    for use in (lambda: list(read_log(log)), lambda: TrajectoryLog(log)):
        with pytest.raises(ValueError, match=r"part_0000.jsonl.gz: compressed data is damaged behind byte \d+.*move"):
            use()
    assert log.read_bytes() == spoilt


def test_a_line_that_is_no_trajectory_is_named(log):
    write(log, [0])
    log.write_bytes(log.read_bytes() + gzip.compress(b'{"problem": 1}\n'))
    with pytest.raises(ValueError, match=r"part_0000.jsonl.gz:2: not a trajectory"):
        list(read_log(log))


def test_long_trajectories_pass_the_borders_of_what_is_read_at_a_time(log):
    noise = os.urandom(1 << 20).hex()  # compresses to more than one chunk
    long = scored(0)
    long = replace(long, trajectory=replace(long.trajectory, transcript=noise * 2))
    with TrajectoryLog(log) as one:
        for _ in range(3):
            one.append(long)
    assert list(read_log(log)) == [long] * 3


def test_a_killed_process_loses_nothing_that_it_had_appended(log):
    program = f"""
        import sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from pathlib import Path
        from test_report_trajectory_log import TrajectoryLog, scored
        with TrajectoryLog(Path({str(log)!r})) as log:
            for number in range(10**9):
                log.append(scored(number))
                print(number, flush=True)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line == "20\n":
                os.kill(process.pid, signal.SIGKILL)
                break
        told = int((process.stdout.read().split() or ["20"])[-1])
    kept = list(read_log(log))
    assert kept == [scored(number) for number in range(len(kept))]
    assert len(kept) >= told + 1
