"""Training curves: panels, values, gaps and errors."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.logs.metric_names import MetricName
from memsearcher_jax.report.plots import PANELS, draw_panels, panels_of, running_mean, training_curves


def test_only_measured_metrics_have_panels_and_a_family_has_a_line_for_each_member_that_occurred():
    first = {"reward": 0.3, "exact_match": 0.5, "exact_match/1_hops": 0.5, "stop/answered": 1.0, "stop/fault": 0.0}
    second = {"reward": 0.4, "exact_match": 0.4, "exact_match/3_hops": 0.4, "stop/max_turns": 0.1, "time/a": 1.0}
    steps = [{"step": 3, **first}, {"step": 4, **second}]
    panels = panels_of(steps)
    assert {panel.title: panel.metrics for panel in panels} == {
        "Reward": ("reward",),
        "Exact match": ("exact_match",),
        "Exact match by hops": ("exact_match/1_hops", "exact_match/3_hops"),
        "Stop reasons": ("stop/answered", "stop/max_turns"),
        "Time per step": ("time/a",),
    }
    reward, _, hops, *_ = draw_panels(panels, steps).axes
    np.testing.assert_allclose(reward.lines[0].get_xydata(), [[3, 0.3], [4, 0.4]])
    assert [text.get_text() for text in hops.get_legend().get_texts()] == ["1 hop", "3 hops"]


def test_non_finite_values_are_gaps_and_counted():
    steps = [{"step": step, "kl": value} for step, value in enumerate([0.1, math.nan, math.inf, 0.2])]
    (axes,) = draw_panels(panels_of(steps), steps).axes
    np.testing.assert_array_equal(np.isfinite(axes.lines[0].get_ydata()), [True, False, False, True])
    assert "2 not finite" in [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("values", [(0.25, 0.5), (-0.5, 0.5), (7.1, 7.1)])
def test_the_y_axis_begins_at_0_unless_there_are_smaller_values_and_ends_below_the_subtitle(values):
    """A reward is negative where a memory is longer than its stream."""
    steps = [{"step": step, "reward": value} for step, value in enumerate(values)]
    (axes,) = draw_panels(panels_of(steps), steps).axes
    bottom, top = axes.get_ylim()
    assert bottom < min(values) if min(values) < 0 else bottom == 0
    assert top > 1.1 * max(values)


def test_every_metric_name_except_rates_and_those_of_other_commands_has_a_panel():
    shown = {name for name in MetricName if any(re.fullmatch(one, name) for panel in PANELS for one in panel.metrics)}
    rates = {MetricName.TOKENS_PER_SECOND, MetricName.PASSAGES_PER_SECOND, MetricName.UNSCORED}
    assert shown == set(MetricName) - rates - {MetricName.QUESTIONS}


@pytest.mark.parametrize("content", ["", '{"step": 0, "odd": 1}\n'])
def test_nothing_to_plot_raises_and_writes_nothing(tmp_path, content):
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="none of the metrics"):
        training_curves(path, tmp_path / "curves.png")
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.jsonl"]


@given(
    st.lists(st.floats(-100, 100) | st.sampled_from([math.nan, math.inf, 1e30]), min_size=1, max_size=20),
    st.integers(1, 25),
)
def test_running_mean_is_the_mean_of_the_window(values, window):
    value_T = np.array(values)
    for index, mean in enumerate(running_mean(value_T, window)):
        known = [value for value in values[max(0, index - window + 1) : index + 1] if math.isfinite(value)]
        expected = sum(known) / len(known) if known else math.nan
        np.testing.assert_allclose(mean, expected, rtol=1e-9, atol=1e-9)
