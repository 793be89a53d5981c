"""Data of the report page: tokens by turn, choice of trajectories, plots."""

import itertools
import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.metrics import MetricsWriter
from memsearcher_jax.logs.trajectories import compress_trajectories, context_lengths, step_path
from memsearcher_jax.report.page.charts import curve
from memsearcher_jax.report.page.run_data import evenly_spaced, groups_of, read_run
from memsearcher_jax.report.plots import Panel
from memsearcher_jax.types import Context, Turn
from tests.samples import ANSWERED, scored


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_turns_of_a_single_context_end_with_their_sampled_run(sampled):
    one = Context(tuple(range(len(sampled))), (0.0,) * len(sampled), tuple(sampled))
    written = "".join("x" if flag else " " for flag in sampled)
    ends = tuple(match.end() for match in re.finditer("x+", written))
    assert context_lengths(scored(turns=(ANSWERED,) * 2, contexts=(one,)).trajectory) == ends


def test_tokens_of_turns_that_share_a_context_until_it_is_summarised():
    """Two turns and a summary in the first context, one turn in the second; and contexts that tell no turns apart."""
    history = Context(tuple(range(9)), (0.0,) * 9, tuple(map(bool, (0, 1, 0, 1, 1, 0, 1, 1, 0))))
    rest = Context(tuple(range(4)), (0.0,) * 4, tuple(map(bool, (0, 0, 1, 1))))
    turns = (Turn("", "a"), Turn("", "b", rewrite="m", new_memory="m"), Turn("m", "c"))
    assert context_lengths(scored(turns=turns, contexts=(history, rest)).trajectory) == (2, 8, 4)
    assert context_lengths(scored(turns=(ANSWERED,) * 3, contexts=(history, rest)).trajectory) == (9, 4)


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
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"reward": 1.0})
    for limit, steps in ((100, range(9)), (6, (0, 4, 8)), (1, (8,))):
        run = read_run(tmp_path, max_trajectories=limit)
        assert [summary.step for summary in run.summaries] == [step for step in steps for _ in range(2)]
    run = read_run(tmp_path, max_trajectories=6)
    assert run.note == "Trajectories are those of 3 of 9 steps, evenly spaced."
    assert [group.label for group in groups_of(run)] == ["all"]


@pytest.mark.parametrize("values", [[-0.5, 0.5], [1.0, 2.0, math.nan, 2.0, math.inf], [math.nan]])
def test_plots_are_reproducible_svg_without_styles_and_with_gaps(values):
    panel, steps = Panel("A <b>", "u", ("x",), 0.0), [{"step": step, "x": value} for step, value in enumerate(values)]
    svg = curve(panel, [("run", steps)])
    assert svg == curve(panel, [("run", steps)])
    finite = [value for value in values if math.isfinite(value)]
    assert svg.count("<title>x: ") == len(finite)
    assert (f"{len(values) - len(finite)} not finite" in svg) == (len(finite) < len(values))
    assert ("No data" in svg) == (not finite) and "A &lt;b&gt;" in svg
    assert "style=" not in svg and "<metadata" not in svg and "font-family" not in svg and "http" not in svg
    assert ("var(--c0)" in svg and "<text" in svg) == bool(finite)
    both = curve(replace(panel, metrics=("x", "y")), [("a", [{"step": 0, "x": 1, "y": 2}])] * 2)
    assert re.findall("</span>([^<]*)</li>", both) == ["a: x", "a: y"] * 2
    if finite:
        ElementTree.fromstring(re.search("<svg.*</svg>", svg)[0].replace("xlink:href", "href"))
