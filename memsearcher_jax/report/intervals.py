"""How far a mean over questions can be trusted, and whether two evaluations of the same questions differ.

Intervals are percentile bootstraps (Efron and Tibshirani, 1993, section 13.3); the test of a paired difference flips
signs (Fisher's permutation test for pairs). Both resample questions, so they say how another sample of questions would
have come out, not how another training run would have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
DRAWS = 10_000

MOST_FLIPPED = 20
"""Differences of unequal size up to which all 2^n signs are tried, in about 20 MB; more are drawn at random."""

_CHUNK = 1 << 20  # numbers that are drawn at a time: memory stays small whatever the number of questions
_ROUNDING = 1e-9  # of the sum of all sizes: sums that are equal but for their order of addition count as equal


@dataclass(frozen=True)
class Interval:
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Paired:
    """`difference` is second less first, over `count` pairs."""

    count: int
    first: float  # mean
    second: float  # mean
    difference: Interval
    p_value: float  # two-sided, of no difference
    exact: bool  # all sign flips were counted, none drawn
    wins: int  # pairs in which the second value is greater
    losses: int  # pairs in which it is smaller


def bootstrap_mean(
    values: Sequence[float] | np.ndarray, rng: np.random.Generator, *, level: float = LEVEL, draws: int = DRAWS
) -> Interval:
    """The mean with its percentile bootstrap interval: the middle `level` of the means of `draws` resamples.

    Of one value, or of equal ones, the interval is a point: a bootstrap sees no spread that the sample does not have.

    Raises:
        ValueError: there are no values, one is not finite, or `level` or `draws` is out of range.
    """
    value_N = _checked(values)
    # A rounded mean may leave the range of its values.
    mean = np.clip(value_N.mean(), value_N.min(), value_N.max())
    return interval(mean, resampled_means(value_N, rng, draws=draws), level=level)


def resampled_means(
    values: Sequence[float] | np.ndarray, rng: np.random.Generator, *, draws: int = DRAWS
) -> np.ndarray:
    """The means of `draws` resamples with replacement: float64 [draws].

    Means of several sets, each resampled within itself, may be added and subtracted draw by draw: that is the bootstrap
    of their macro-average, or of a gap between them, for a fixed choice of sets.

    Raises:
        ValueError: there are no values, one is not finite, or `draws` is below 1.
    """
    value_N = _checked(values)
    if draws < 1:
        raise ValueError(f"draws is {draws}: at least one resample is needed")
    count = len(value_N)
    rows = max(1, _CHUNK // count)
    mean_W = np.concatenate(
        [
            value_N[rng.integers(count, size=(min(rows, draws - start), count), dtype=np.int32)].mean(axis=1)
            for start in range(0, draws, rows)
        ]
    )
    return np.clip(mean_W, value_N.min(), value_N.max())


def interval(mean: float, mean_W: np.ndarray, *, level: float = LEVEL) -> Interval:
    """`mean` with the middle `level` of the means of its resamples. Raises ValueError if `level` is out of range."""
    if not 0 < level < 1:
        raise ValueError(f"level is {level}: it must be between 0 and 1")
    low, high = np.quantile(mean_W, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(mean), float(low), float(high))


def sign_flip_test(
    differences: Sequence[float] | np.ndarray, rng: np.random.Generator, *, draws: int = DRAWS
) -> tuple[float, bool]:
    """Two-sided p-value of "the differences of pairs are symmetric about 0", and whether it is exact.

    If nothing distinguishes the two of a pair, each difference could as well have the other sign: p is the share of the
    2^n flips whose sum is at least as far from 0 as the one seen. Zeros change no sum and are left out. It is counted
    exactly for differences of one size (there it is the sign test, and of zeros and ones McNemar's exact test), and for
    up to `MOST_FLIPPED` others. Beyond, `draws` flips are drawn and p = (1 + as far) / (1 + draws), which is never 0
    (Phipson and Smyth, 2010). Without any difference p is 1.

    Raises:
        ValueError: there are no differences, one is not finite, or `draws` is below 1.
    """
    difference_N = _checked(differences)
    if draws < 1:
        raise ValueError(f"draws is {draws}: at least one flip is needed")
    difference_N = difference_N[difference_N != 0]
    size_N = np.abs(difference_N)
    if not len(size_N):
        return 1.0, True
    if np.ptp(size_N) <= _ROUNDING * size_N.max():
        return _sign_test(int((difference_N > 0).sum()), len(size_N)), True
    seen = abs(difference_N.sum()) - _ROUNDING * size_N.sum()
    if len(size_N) <= MOST_FLIPPED:
        return float(np.mean(np.abs(_all_flips(size_N)) >= seen)), True
    rows = max(1, _CHUNK // len(size_N))
    as_far = 0
    for start in range(0, draws, rows):
        flip_WN = rng.integers(2, size=(min(rows, draws - start), len(size_N)), dtype=np.int8)
        as_far += int((np.abs((2.0 * flip_WN - 1.0) @ size_N) >= seen).sum())
    return (1 + as_far) / (1 + draws), False


def paired_difference(
    first: Sequence[float] | np.ndarray,
    second: Sequence[float] | np.ndarray,
    rng: np.random.Generator,
    *,
    level: float = LEVEL,
    draws: int = DRAWS,
) -> Paired:
    """How the second values differ from the first ones of the same questions, in the same order.

    Raises:
        ValueError: the two differ in length, are empty, or hold a value that is not finite.
    """
    first_N, second_N = _checked(first), _checked(second)
    if len(first_N) != len(second_N):
        raise ValueError(f"{len(first_N)} values cannot be paired with {len(second_N)}")
    difference_N = second_N - first_N
    p_value, exact = sign_flip_test(difference_N, rng, draws=draws)
    return Paired(
        count=len(difference_N),
        first=float(first_N.mean()),
        second=float(second_N.mean()),
        difference=bootstrap_mean(difference_N, rng, level=level, draws=draws),
        p_value=p_value,
        exact=exact,
        wins=int((difference_N > 0).sum()),
        losses=int((difference_N < 0).sum()),
    )


def _sign_test(positive: int, count: int) -> float:
    """The share of the 2^count signs whose split is at least as uneven; in whole numbers, so for any count."""
    fewer = min(positive, count - positive)
    if 2 * fewer == count:
        return 1.0
    return 2 * sum(math.comb(count, k) for k in range(fewer + 1)) / 2**count


def _all_flips(size_N: np.ndarray) -> np.ndarray:
    """The sums of all 2^N sign flips: [2^N]."""
    sum_W = np.zeros(1)
    for size in size_N:
        sum_W = np.concatenate([sum_W + size, sum_W - size])
    return sum_W


def _checked(values: Sequence[float] | np.ndarray) -> np.ndarray:
    value_N = np.asarray(values, np.float64)
    if value_N.ndim != 1 or not len(value_N):
        raise ValueError("a mean needs a list of at least one value")
    if not np.isfinite(value_N).all():
        raise ValueError(f"value {int(np.argmin(np.isfinite(value_N)))} is not finite: a mean of it says nothing")
    return value_N
