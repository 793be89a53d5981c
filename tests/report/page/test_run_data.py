"""Data of the report page: tokens by turn, intervals, choice of trajectories, axis ticks."""

import itertools
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.metrics import MetricsWriter
from memsearcher_jax.logs.trajectories import compress_trajectories, context_lengths, step_path
from memsearcher_jax.report.page.run_data import (
    choose_files,
    distinct_labels,
    evenly_spaced,
    groups_of,
    read_run,
)
from memsearcher_jax.report.page.svg import Line, line_chart, ticks
from memsearcher_jax.report.statistics import wilson_interval
from memsearcher_jax.types import Context, Outcome, Problem, ScoredTrajectory, StopReason, Trajectory, Turn


def scored():
    problem, turn = Problem("q1", "Who?", ("Ada",)), Turn("", "\\boxed{Ada}")
    trajectory = Trajectory(
        problem, 0, Outcome(StopReason.ANSWERED, "Ada", (turn,)), (Context((1,), (0.0,), (True,)),), ""
    )
    return ScoredTrajectory(trajectory, 1.0, "", {"exact_match": 1.0})


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_turns_of_a_single_context_end_with_their_sampled_run(sampled):
    size = len(sampled)
    trajectory = Trajectory(
        Problem("q", "", ()),
        0,
        Outcome(StopReason.ANSWERED, "", (Turn("", ""),) * 2),
        (Context(tuple(range(size)), (0.0,) * size, tuple(sampled)),),
        "",
    )
    written = "".join("x" if flag else " " for flag in sampled)
    assert context_lengths(trajectory) == tuple(match.end() for match in re.finditer("x+", written))


@given(st.integers(1, 200), st.integers(1, 60))
def test_chosen_items_are_evenly_spaced(total, limit):
    kept = evenly_spaced(total, limit)
    assert len(kept) == len(set(kept)) == min(total, limit)
    assert kept[-1] == total - 1 and (limit == 1 or kept[0] == 0)
    gaps = {after - before for before, after in itertools.pairwise(kept)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_evenly_spaced_steps_of_a_long_run_are_read(tmp_path):
    for step in range(9):
        atomic_write(step_path(tmp_path, step), compress_trajectories([scored()] * 2))
    files = sorted((tmp_path / "trajectories").iterdir())
    assert choose_files(files, 100) == files
    assert choose_files(files, 6) == [files[0], files[4], files[8]]
    assert choose_files(files, 1) == [files[8]]
    assert choose_files([], 1) == []
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"reward": 1.0})
    run = read_run(tmp_path, max_trajectories=6)
    assert [summary.step for summary in run.summaries] == [0, 0, 4, 4, 8, 8]
    assert run.note == "Trajectories are those of 3 of 9 steps, evenly spaced."
    assert [group.label for group in groups_of(run)] == ["all"]


def test_runs_with_equal_names_get_distinct_labels(tmp_path):
    atomic_write(tmp_path / "ev" / "trajectories" / "shard_0000.jsonl.gz", compress_trajectories([scored()]))
    (tmp_path / "ev" / "run.json").write_text(json.dumps({"agent": {"workflow": "memsearcher"}}))
    run = read_run(tmp_path / "ev", max_trajectories=5)
    assert distinct_labels(run, run) == ("memsearcher (ev) 1", "memsearcher (ev) 2")


def test_wilson_interval_of_known_proportions():
    assert wilson_interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)  # n / (n + z^2) from above
    assert all(map(math.isnan, wilson_interval(0, 0)))


@given(st.integers(1, 5000).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_wilson_interval_contains_the_proportion(counts):
    correct, total = counts
    low, high = wilson_interval(correct, total)
    assert 0 <= low <= correct / total <= high <= 1


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_ticks_enclose_the_values(low, width):
    marks = ticks(low, low + width)
    slack = 1e-6 * max(abs(low), width) + 1e-300  # smaller values count as 0
    assert marks[0] <= low + slack
    assert marks[-1] >= low + width - slack
    assert 2 <= len(marks) <= 7
    assert marks == sorted(set(marks))


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [(0, 0.49, [0, 0.1, 0.2, 0.3, 0.4, 0.5]), (3, 17, [0, 5, 10, 15, 20]), (0, 0, [0, 0.2, 0.4, 0.6, 0.8, 1])],
)
def test_ticks_are_round(low, high, marks):
    assert ticks(low, high) == pytest.approx(marks)


def test_negative_values_are_inside_the_plot():
    chart = line_chart("X", "unit", "step", [Line("x", [(0, -0.5), (1, 0.5)])], y_min=0)
    assert all(float(y) <= 200 for y in re.findall(r'<circle[^>]* cy="([\d.]+)"', chart))
    assert ">-0.6</text>" in chart


def test_a_non_finite_value_is_a_gap_in_the_line():
    line = Line("x", [(0, 1.0), (1, 2.0), (2, math.nan), (3, 2.0), (4, math.inf)])
    chart = line_chart("X", "unit", "step", [line])
    (path,) = re.findall(r'd="(M[^"]+)"', chart)
    assert [command[0] for command in re.findall(r"[ML][^ML]+", path)] == ["M", "L", "M"]
    assert chart.count("<circle") == 3
    assert "2 not finite" in chart
    assert "No data" in line_chart("X", "unit", "step", [Line("x", [(0, math.nan)])])
