"""Intervals and tests against values known by enumeration, formula or simulation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from memsearcher_jax.report.statistics import combined_interval, mean_interval, paired_comparison, wilson_interval

value = st.floats(-1e3, 1e3).map(lambda x: round(x, 3))


def rng(seed=0):
    return np.random.default_rng(seed)


def test_intervals_agree_with_the_normal_approximation():
    """Means of 400 coin flips, of zeros and ones and of other values: the standard error is known."""
    error = math.sqrt(0.3 * 0.7 / 400)
    for scale in (1, 2):
        interval = mean_interval(scale * np.repeat([0.0, 1.0], [280, 120]), rng())
        assert interval.mean == pytest.approx(scale * 0.3)
        assert interval.low == pytest.approx(scale * (0.3 - 1.96 * error), abs=0.008)
        assert interval.high == pytest.approx(scale * (0.3 + 1.96 * error), abs=0.008)


@given(st.lists(value, min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_an_interval_lies_within_the_values_and_is_seeded(values):
    interval = mean_interval(values, rng())
    assert min(*values, 0) <= interval.low <= interval.mean <= interval.high <= max(*values, 1)
    assert interval == mean_interval(values, rng())
    if len(set(values)) == 1 and values[0] not in (0, 1):
        assert interval.low == interval.mean == interval.high == values[0]


def test_the_interval_of_a_proportion_is_wilsons():
    for total in (1, 10, 345):
        for successes in {0, 1, total // 2, total}:
            low, high = wilson_interval(successes, total)
            scipys = binomtest(successes, total).proportion_ci(method="wilson")
            assert (low, high) == pytest.approx((scipys.low, scipys.high), abs=1e-12)
            assert 0 <= low <= successes / total <= high <= 1
    none_of_four = mean_interval([0.0] * 4, rng())
    assert (none_of_four.low, none_of_four.high) == wilson_interval(0, 4) != (0.0, 0.0)
    average = combined_interval([none_of_four] * 2, [0.5, 0.5])  # is not certainly zero
    assert (average.mean, average.low, average.high) == pytest.approx((0, 0, none_of_four.high / math.sqrt(2)))
    gap = combined_interval([mean_interval([1.0] * 4, rng()), none_of_four], [1, -1])
    assert (gap.mean, gap.low, gap.high) == pytest.approx((1, 1 - none_of_four.high * math.sqrt(2), 1))


@pytest.mark.parametrize(
    ("wins", "losses", "p_value"),
    [(5, 0, 2 / 32), (8, 2, 2 * (1 + 10 + 45) / 1024), (3, 3, 1.0), (3000, 3000, 1.0), (0, 0, 1.0)],
)
def test_the_sign_test_of_questions_won_and_lost(wins, losses, p_value):
    """McNemar's exact test: questions with equal outcomes are ignored, and so is the size of a difference."""
    for size in (1.0, 0.3):
        pairs = [(0, size)] * wins + [(size, 0)] * losses + [(1, 1)] * 17
        assert paired_comparison(pairs, rng()).p_value == pytest.approx(p_value)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_no_values_and_values_that_are_not_finite_raise(values):
    with pytest.raises(ValueError, match="statistics need finite values"):
        mean_interval(values, rng())
