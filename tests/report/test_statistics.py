"""Intervals and tests against values known by enumeration, formula or simulation."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsearcher_jax.report.statistics import MAX_EXACT_PAIRS, bootstrap_mean, paired_comparison, sign_flip_test

value = st.floats(-1e3, 1e3).map(lambda x: round(x, 3))


def rng(seed=0):
    return np.random.default_rng(seed)


def by_enumeration(differences):
    """The definition, by enumeration, in integer thousandths to avoid rounding."""
    whole = [round(1000 * one) for one in differences]
    seen = abs(sum(whole))
    flips = list(itertools.product((-1, 1), repeat=len(whole)))
    return sum(abs(sum(s * d for s, d in zip(signs, whole, strict=True))) >= seen for signs in flips) / len(flips)


def test_an_interval_agrees_with_the_normal_approximation():
    """A mean of 400 coin flips: the standard error is known."""
    value_N = np.repeat([0.0, 1.0], [280, 120])
    interval = bootstrap_mean(value_N, rng(), n_resamples=20_000)
    error = math.sqrt(0.3 * 0.7 / 400)
    assert interval.mean == pytest.approx(0.3)
    assert interval.low == pytest.approx(0.3 - 1.96 * error, abs=0.004)
    assert interval.high == pytest.approx(0.3 + 1.96 * error, abs=0.004)


@pytest.mark.parametrize(("level", "low", "high"), [(0.4, 0.5, 0.5), (0.6, 0.0, 1.0)])
def test_an_interval_of_two_values_equals_the_enumeration(level, low, high, monkeypatch):
    """The means 0, 1/2, 1 have probability 1/4, 1/2, 1/4: the middle 40 % is one half, the middle 60 % is all."""
    monkeypatch.setattr("memsearcher_jax.report.statistics.CONFIDENCE_LEVEL", level)
    interval = bootstrap_mean([0.0, 1.0], rng())
    assert (interval.low, interval.mean, interval.high) == (low, 0.5, high)


def test_intervals_have_nominal_coverage(monkeypatch):
    monkeypatch.setattr("memsearcher_jax.report.statistics.CONFIDENCE_LEVEL", 0.9)
    draw = rng(7)
    samples = draw.normal(2.0, 3.0, (400, 60))
    intervals = [bootstrap_mean(sample, draw, n_resamples=400) for sample in samples]
    covered = np.mean([one.low <= 2.0 <= one.high for one in intervals])
    assert (
        0.84 < covered < 0.94
    )  # 0.9 with a standard error of 0.015; percentile intervals of 60 values are a bit narrow


def test_chunking_does_not_change_the_number_of_resamples(monkeypatch):
    monkeypatch.setattr("memsearcher_jax.report.statistics._CHUNK", 7)
    value_N = np.repeat([0.0, 1.0], [280, 120])[::40]  # 7 zeros, 3 ones: each row is a chunk
    interval = bootstrap_mean(value_N, rng(), n_resamples=3_000)
    assert interval.low == pytest.approx(0.0, abs=0.11)
    assert interval.high == pytest.approx(0.6, abs=0.11)
    differences = rng(3).normal(0.3, 1.0, 30)
    p_value, exact = sign_flip_test(differences, rng(), n_resamples=3_001)
    assert not exact
    monkeypatch.undo()
    assert p_value == pytest.approx(sign_flip_test(differences, rng(5), n_resamples=20_000)[0], abs=0.03)


@given(st.lists(value, min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_an_interval_lies_within_the_values_and_is_seeded(values):
    interval = bootstrap_mean(values, rng(), n_resamples=200)
    assert min(values) <= interval.low <= interval.high <= max(values)
    assert interval == bootstrap_mean(values, rng(), n_resamples=200)
    if len(set(values)) == 1:
        assert interval.low == interval.mean == interval.high == values[0]


@given(st.lists(value, min_size=1, max_size=9))
@settings(max_examples=80, deadline=None)
def test_small_samples_enumerate_all_flips(differences):
    p_value, exact = sign_flip_test(differences, rng())
    assert exact
    assert p_value == pytest.approx(by_enumeration(differences))


@given(st.lists(st.sampled_from([-0.3, 0.0, 0.3]), min_size=1, max_size=12))
def test_differences_of_equal_size_give_the_sign_test(differences):
    p_value, exact = sign_flip_test(differences, rng())
    assert exact
    assert p_value == pytest.approx(by_enumeration(differences))


@pytest.mark.parametrize(
    ("wins", "losses", "p_value"),
    [
        (5, 0, 2 / 32),
        (8, 2, 2 * (1 + 10 + 45) / 1024),
        (3, 3, 1.0),
        (3000, 3000, 1.0),
        (0, 0, 1.0),
    ],
)
def test_the_sign_test_of_questions_won_and_lost(wins, losses, p_value):
    """McNemar's exact test: questions with equal outcomes are ignored."""
    differences = [1.0] * wins + [-1.0] * losses + [0.0] * 17
    assert sign_flip_test(differences, rng()) == (pytest.approx(p_value), True)


def test_a_large_sign_test_agrees_with_the_normal_approximation():
    """1,060 of 2,000: z with the correction for continuity is (60 - 0.5) / sqrt(500)."""
    p_value, exact = sign_flip_test([1.0] * 1060 + [-1.0] * 940, rng())
    z = 59.5 / math.sqrt(500)
    assert exact
    assert p_value == pytest.approx(math.erfc(z / math.sqrt(2)), rel=0.02)


def test_sampled_flips_agree_with_enumerated_flips(monkeypatch):
    differences = rng(3).normal(0.4, 1.0, MAX_EXACT_PAIRS)
    counted, exact = sign_flip_test(differences, rng())
    assert exact
    monkeypatch.setattr("memsearcher_jax.report.statistics.MAX_EXACT_PAIRS", 5)
    drawn, exact = sign_flip_test(differences, rng(), n_resamples=40_000)
    assert not exact
    assert 0.01 < counted < 0.9
    assert drawn == pytest.approx(counted, abs=0.01)


def test_a_sampled_p_value_is_never_zero():
    differences = rng(0).uniform(1.0, 2.0, 60)  # all of one sign: the exact value is 2 / 2^60
    assert sign_flip_test(differences, rng(), n_resamples=99) == (pytest.approx(1 / 100), False)


def test_p_values_are_uniform_under_the_null_hypothesis():
    draw = rng(11)
    p_N = np.array([sign_flip_test(draw.normal(0, 1, 25), draw, n_resamples=400)[0] for _ in range(500)])
    for level in (0.05, 0.2, 0.5):
        assert np.mean(p_N <= level) == pytest.approx(level, abs=3.5 * math.sqrt(level * (1 - level) / 500))


def test_a_paired_comparison_equals_hand_computed_values():
    paired = paired_comparison([0, 1, 0, 0, 1], [1, 1, 1, 0, 0], rng())
    assert (paired.count, paired.wins, paired.losses) == (5, 2, 1)
    assert (paired.first, paired.second) == (pytest.approx(0.4), pytest.approx(0.6))
    assert paired.difference.mean == pytest.approx(0.2)
    assert paired.difference.low < 0.2 < paired.difference.high
    assert (paired.p_value, paired.exact) == (1.0, True)  # three signs cannot be split more evenly than 2 to 1


@given(st.lists(st.tuples(value, value), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_swapping_the_sides_negates_the_difference(pairs):
    first, second = zip(*pairs, strict=True)
    one, other = (paired_comparison(*sides, rng()) for sides in ((first, second), (second, first)))
    assert one.difference.mean == pytest.approx(-other.difference.mean)
    assert (one.wins, one.losses) == (other.losses, other.wins)
    assert one.p_value == pytest.approx(other.p_value)


def test_pairing_detects_a_small_consistent_difference():
    """Questions differ much more than the two evaluations do."""
    first_N = rng(1).normal(0, 10, 40)
    second_N = first_N + rng(2).uniform(0.05, 0.15, 40)
    paired = paired_comparison(first_N, second_N, rng())
    assert paired.p_value < 0.001
    assert 0 < paired.difference.low < paired.difference.high < 0.2
    apart = [bootstrap_mean(values, rng()) for values in (first_N, second_N)]
    assert apart[0].high > apart[1].low


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bootstrap_mean([], rng()), "at least one value"),
        (lambda: bootstrap_mean([[1.0]], rng()), "at least one value"),
        (lambda: bootstrap_mean([1.0, math.nan], rng()), "value 1 is not finite"),
        (lambda: sign_flip_test([], rng()), "at least one value"),
        (lambda: paired_comparison([1.0, 2.0], [1.0], rng()), "2 values cannot be paired with 1"),
        (lambda: paired_comparison([1.0], [math.inf], rng()), "value 0 is not finite"),
    ],
)
def test_invalid_arguments_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()
