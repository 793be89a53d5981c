"""Bootstrap intervals of means over questions, and paired tests of two evaluations of the same questions.

Intervals are percentile bootstraps (Efron and Tibshirani, 1993, section 13.3); paired differences are tested by random
sign flips (Fisher's permutation test for pairs). Both resample questions: they estimate the variation over samples of
questions, not over training runs. Suffixes of arrays: N values, W resamples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

CONFIDENCE_LEVEL = 0.95
N_RESAMPLES = 10_000

MAX_EXACT_PAIRS = 20
"""Up to this many differences of unequal size, all 2^n sign flips are enumerated, in about 20 MB."""

_CHUNK = 1 << 20  # random numbers per draw: bounds the memory for any number of questions
_ROUNDING = 1e-9  # of the sum of all sizes: sums that differ only by the order of addition count as equal
_Z_95 = 1.959964  # standard normal quantile of a two-sided 95% interval


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
    p_value: float  # two-sided, of no difference
    exact: bool  # all sign flips were enumerated
    wins: int  # pairs whose second value is greater
    losses: int  # pairs whose second value is smaller


def mean(values: Sequence[float]) -> float:
    """The mean without rounding errors of summation; NaN for no values."""
    return math.fsum(values) / len(values) if values else math.nan


def wilson_interval(successes: int, total: int) -> tuple[float, float]:
    """95% interval of a proportion (Wilson 1927, "Probable inference"), within [0, 1] for any sample size."""
    if total == 0:
        return math.nan, math.nan
    proportion, spread = successes / total, _Z_95**2 / total
    center = (proportion + spread / 2) / (1 + spread)
    half = _Z_95 / (1 + spread) * math.sqrt(proportion * (1 - proportion) / total + spread / (4 * total))
    # Rounding could otherwise move an end past the proportion when it is 0 or 1.
    return max(0.0, min(center - half, proportion)), min(1.0, max(center + half, proportion))


def bootstrap_mean(values: ArrayLike, rng: np.random.Generator, *, n_resamples: int = N_RESAMPLES) -> Interval:
    """The mean with its percentile bootstrap interval.

    For one value, or equal values, the interval is a point: the bootstrap sees only the spread of the sample.

    Raises:
        ValueError: there are no values, or one is not finite.
    """
    value_N = _checked(values)
    # Rounding could otherwise move the mean outside the range of the values.
    clipped = np.clip(value_N.mean(), value_N.min(), value_N.max())
    return percentile_interval(clipped, resampled_means(value_N, rng, n_resamples=n_resamples))


def resampled_means(values: ArrayLike, rng: np.random.Generator, *, n_resamples: int = N_RESAMPLES) -> np.ndarray:
    """The means of resamples with replacement: float64 [n_resamples].

    The means of several sets, each resampled on its own, may be added and subtracted elementwise: the result is the
    bootstrap of their macro average, or of a difference, for a fixed choice of sets.

    Raises ValueError as `bootstrap_mean` does.
    """
    value_N = _checked(values)
    count = len(value_N)
    rows = max(1, _CHUNK // count)
    shapes = [(min(rows, n_resamples - start), count) for start in range(0, n_resamples, rows)]
    means = [value_N[rng.integers(count, size=shape, dtype=np.int32)].mean(axis=1) for shape in shapes]
    return np.clip(np.concatenate(means), value_N.min(), value_N.max())


def percentile_interval(mean: float, mean_W: np.ndarray) -> Interval:
    """`mean` with the central `CONFIDENCE_LEVEL` of its resampled means."""
    low, high = np.quantile(mean_W, [(1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2])
    return Interval(float(mean), float(low), float(high))


def sign_flip_test(
    differences: ArrayLike, rng: np.random.Generator, *, n_resamples: int = N_RESAMPLES
) -> tuple[float, bool]:
    """Two-sided p-value of "paired differences are symmetric about 0", and whether it is exact.

    Under the null hypothesis each difference has either sign with equal probability: p is the fraction of the 2^n sign
    flips whose sum is at least as far from 0 as the observed sum. Zeros change no sum and are ignored. The fraction is
    exact for differences of equal size (the sign test; for zeros and ones McNemar's exact test) and for at most
    `MAX_EXACT_PAIRS` others. Otherwise `n_resamples` flips are drawn and p = (1 + extreme) / (1 + n_resamples), which
    is never 0 (Phipson and Smyth, 2010). Without any difference p is 1.

    Raises ValueError as `bootstrap_mean` does.
    """
    difference_N = _checked(differences)
    difference_N = difference_N[difference_N != 0]
    size_N = np.abs(difference_N)
    if not len(size_N):
        return 1.0, True
    if np.ptp(size_N) <= _ROUNDING * size_N.max():
        return _sign_test(int((difference_N > 0).sum()), len(size_N)), True
    observed = abs(difference_N.sum()) - _ROUNDING * size_N.sum()
    if len(size_N) <= MAX_EXACT_PAIRS:
        sum_W = np.zeros(1)
        for size in size_N:
            sum_W = np.concatenate([sum_W + size, sum_W - size])
        return float(np.mean(np.abs(sum_W) >= observed)), True
    rows = max(1, _CHUNK // len(size_N))
    extreme = 0
    for start in range(0, n_resamples, rows):
        flip_WN = rng.integers(2, size=(min(rows, n_resamples - start), len(size_N)), dtype=np.int8)
        extreme += int((np.abs((2.0 * flip_WN - 1.0) @ size_N) >= observed).sum())
    return (1 + extreme) / (1 + n_resamples), False


def paired_comparison(first: ArrayLike, second: ArrayLike, rng: np.random.Generator) -> PairedComparison:
    """Compare two values per question, given in the same order.

    Raises:
        ValueError: the two differ in length, are empty, or contain a value that is not finite.
    """
    first_N, second_N = _checked(first), _checked(second)
    if len(first_N) != len(second_N):
        raise ValueError(f"{len(first_N)} values cannot be paired with {len(second_N)}")
    difference_N = second_N - first_N
    p_value, exact = sign_flip_test(difference_N, rng)
    return PairedComparison(
        count=len(difference_N),
        first=float(first_N.mean()),
        second=float(second_N.mean()),
        difference=bootstrap_mean(difference_N, rng),
        p_value=p_value,
        exact=exact,
        wins=int((difference_N > 0).sum()),
        losses=int((difference_N < 0).sum()),
    )


def _sign_test(positive: int, count: int) -> float:
    """The fraction of the 2^count sign vectors that are at least as unbalanced, in exact integers."""
    fewer = min(positive, count - positive)
    if 2 * fewer == count:
        return 1.0
    return 2 * sum(math.comb(count, k) for k in range(fewer + 1)) / 2**count


def _checked(values: ArrayLike) -> np.ndarray:
    value_N = np.asarray(values, np.float64)
    if value_N.ndim != 1 or not len(value_N):
        raise ValueError("statistics need a list of at least one value")
    if not np.isfinite(value_N).all():
        raise ValueError(f"value {int(np.argmin(np.isfinite(value_N)))} is not finite: fix or drop it")
    return value_N
