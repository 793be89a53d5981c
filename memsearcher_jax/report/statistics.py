"""Intervals of means over questions, and paired tests of two evaluations of the same questions, most by scipy.stats.

Intervals are Wilson's where every value is 0 or 1, otherwise percentile bootstraps; paired differences are tested by
the sign test, which for scores of 0 and 1 is McNemar's exact test. All estimate the variation over samples of
questions, not over training runs. The suffix N of arrays: values.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

CONFIDENCE_LEVEL = 0.95
N_RESAMPLES = 2_000
BATCH = 1 << 20  # random numbers at a time: bounds the memory for any number of questions


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedComparison:
    """`difference` is second minus first, over `count` pairs."""

    count: int
    first: float  # mean
    second: float  # mean
    difference: Interval
    p_value: float  # two-sided, of as many wins as losses
    wins: int  # pairs whose second value is greater
    losses: int  # pairs whose second value is smaller


def named_rng(seed: int, name: str) -> np.random.Generator:
    """A generator of its own for each name, so that numbers do not depend on which others are drawn."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def mean(values: Sequence[float]) -> float:
    """The mean without rounding errors of summation; NaN for no values."""
    return math.fsum(values) / len(values) if values else math.nan


def wilson_interval(successes: int, total: int) -> tuple[float, float]:
    """Interval of a proportion (Wilson, 1927), within [0, 1] for any sample size of at least 1."""
    # Every report has some: to import scipy.stats for them would take longer than to write the rest of its page.
    z2 = NormalDist().inv_cdf((1 + CONFIDENCE_LEVEL) / 2) ** 2
    half = math.sqrt(z2 * (successes * (total - successes) / total + z2 / 4))
    low = (successes + z2 / 2 - half) / (total + z2)
    one_minus_high = (total - successes + z2 / 2 - half) / (total + z2)
    return max(0.0, low), 1 - max(0.0, one_minus_high)


def mean_interval(values: ArrayLike, rng: np.random.Generator) -> Interval:
    """The mean with its interval; that of equal values other than 0 and 1 is a point.

    Raises ValueError if there are no values, or one is not finite.
    """
    value_N = _checked(values)
    if np.isin(value_N, (0, 1)).all():
        return Interval(float(value_N.mean()), *wilson_interval(int(value_N.sum()), len(value_N)))
    return bootstrap_interval(value_N, rng)


def bootstrap_interval(values: ArrayLike, rng: np.random.Generator) -> Interval:
    """The mean with a percentile bootstrap, which of equal values is a point. Raises ValueError as `mean_interval`."""
    from scipy import stats

    value_N = _checked(values)
    lowest = value_N.min()
    highest = value_N.max()
    if lowest == highest:
        return Interval(float(lowest), float(lowest), float(lowest))
    options: Any = {"n_resamples": N_RESAMPLES, "batch": max(1, BATCH // len(value_N)), "method": "percentile"}
    found = stats.bootstrap((value_N,), np.mean, confidence_level=CONFIDENCE_LEVEL, rng=rng, **options)
    # Rounding could otherwise move a mean outside the range of the values.
    bounded = np.clip([value_N.mean(), *found.confidence_interval], lowest, highest)
    return Interval(*bounded.tolist())


def combined_interval(intervals: Sequence[Interval], weights: Sequence[float]) -> Interval:
    """The weighted sum of independent means, with the interval that theirs imply.

    MOVER, equation 8 of Zou and Donner (2008), "Construction of confidence limits about effect measures".
    """
    pairs = list(zip(weights, intervals, strict=True))
    total = math.fsum(weight * interval.mean for weight, interval in pairs)
    below: list[float] = []
    above: list[float] = []
    for weight, interval in pairs:
        # A negative weight exchanges the ends of an interval.
        ends = (weight * (interval.low - interval.mean), weight * (interval.high - interval.mean))
        below.append(min(ends))
        above.append(max(ends))
    return Interval(total, total - math.hypot(*below), total + math.hypot(*above))


def paired_comparison(pairs: Sequence[tuple[float, float]], rng: np.random.Generator) -> PairedComparison:
    """Compare two values per question. Raises ValueError as `mean_interval` does."""
    from scipy import stats

    first_N, second_N = np.array(pairs, np.float64).T
    difference_N = _checked(second_N - first_N)
    wins = int((difference_N > 0).sum())
    losses = int((difference_N < 0).sum())
    return PairedComparison(
        count=len(difference_N),
        first=float(first_N.mean()),
        second=float(second_N.mean()),
        difference=bootstrap_interval(difference_N, rng),
        p_value=float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0,
        wins=wins,
        losses=losses,
    )


def _checked(values: ArrayLike) -> np.ndarray:
    value_N = np.asarray(values, np.float64)
    if not value_N.size or not np.isfinite(value_N).all():
        raise ValueError(f"statistics need finite values, at least one: {values}")
    return value_N
