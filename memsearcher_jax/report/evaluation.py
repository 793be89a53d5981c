"""An evaluation in numbers: each benchmark, their average, and what was trained on against what was not.

Means have percentile bootstrap intervals over questions (report/intervals.py). An average over benchmarks is a macro
average: each counts the same, however many questions it has; its interval resamples the questions within each benchmark
and holds the choice of benchmarks fixed.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from memsearcher_jax.report.intervals import DRAWS, LEVEL, Interval, interval, resampled_means
from memsearcher_jax.report.page_facts import Facts, mean

SCORES = {
    "exact_match": "EM",
    "f1": "F1",
    "cover_exact_match": "cover-EM",
    "precision": "precision",
    "recall": "recall",
}
"""The metrics of an answer, and what they are called in print."""


@dataclass(frozen=True)
class Benchmark:
    """The questions of one benchmark."""

    questions: int
    scores: dict[str, Interval]  # by the keys of SCORES
    turns: float  # mean over questions
    searches: float  # likewise
    tokens_per_turn: float  # in context when a turn ends, mean over turns; 0 without a turn
    mean_peak_context_tokens: float  # of a question's longest context, mean over questions
    peak_context_tokens: int  # the longest context of all
    stops: dict[str, float]  # why trajectories ended, shares, the most frequent first


@dataclass(frozen=True)
class Average:
    """The macro average over some benchmarks."""

    benchmarks: tuple[str, ...]
    scores: dict[str, Interval]


@dataclass(frozen=True)
class Evaluation:
    """`inside` is what the weights were trained on, `outside` the rest, `gap` the one less the other.

    These are None where one of the two is empty.
    """

    benchmarks: dict[str, Benchmark]
    macro: Average
    inside: Average | None
    outside: Average | None
    gap: dict[str, Interval] | None

    def to_json(self) -> dict[str, Any]:
        return {"level": LEVEL, "draws": DRAWS, **asdict(self)}


def evaluation_of(
    facts: Sequence[Facts], *, trained_on: Collection[str], unnamed: str = "questions", seed: int = 0
) -> Evaluation:
    """The numbers of an evaluation.

    Args:
      facts: of every question; those of one benchmark have its name in `dataset`.
      trained_on: names of the benchmarks that count as in distribution.
      unnamed: what to call questions whose benchmark is not named.
      seed: of the resampling. Another benchmark in the evaluation changes no interval of this one.

    Raises:
      ValueError: there is no question, or one lacks a score.
    """
    if not facts:
        raise ValueError("an evaluation without a question has no numbers")
    groups: dict[str, list[Facts]] = {}
    for one in facts:
        if missing := [name for name in SCORES if name not in one.scores]:
            raise ValueError(f"a trajectory has no {missing[0]}: it is of another version; evaluate again")
        groups.setdefault(one.dataset or unnamed, []).append(one)
    drawn = {name: {score: _Drawn.of(name, score, group, seed) for score in SCORES} for name, group in groups.items()}
    inside = [name for name in groups if name in trained_on]
    outside = [name for name in groups if name not in trained_on]
    split = bool(inside and outside)
    return Evaluation(
        benchmarks={name: _benchmark(group, drawn[name]) for name, group in groups.items()},
        macro=_average(drawn, list(groups)),
        inside=_average(drawn, inside) if split else None,
        outside=_average(drawn, outside) if split else None,
        gap={score: _gap(drawn, inside, outside, score) for score in SCORES} if split else None,
    )


@dataclass(frozen=True)
class _Drawn:
    """A mean and the means of its resamples: float64 [W]."""

    mean: float
    mean_W: np.ndarray

    @classmethod
    def of(cls, name: str, score: str, group: Sequence[Facts], seed: int) -> _Drawn:
        rng = np.random.default_rng([seed, zlib.crc32(f"{name}/{score}".encode())])
        value_N = np.array([one.scores[score] for one in group])
        return cls(float(value_N.mean()), resampled_means(value_N, rng))

    @classmethod
    def average(cls, several: Sequence[_Drawn]) -> _Drawn:
        return cls(float(np.mean([one.mean for one in several])), np.mean([one.mean_W for one in several], axis=0))

    @property
    def interval(self) -> Interval:
        return interval(self.mean, self.mean_W)


def _benchmark(group: Sequence[Facts], drawn: Mapping[str, _Drawn]) -> Benchmark:
    lengths = [tokens for one in group for tokens in one.tokens_of_turns]
    peaks = [max(one.tokens_of_turns, default=0) for one in group]
    stops = Counter(one.stop.value for one in group)
    return Benchmark(
        questions=len(group),
        scores={score: one.interval for score, one in drawn.items()},
        turns=mean([one.turns for one in group]),
        searches=mean([one.searches for one in group]),
        tokens_per_turn=mean(lengths) if lengths else 0.0,
        mean_peak_context_tokens=mean(peaks),
        peak_context_tokens=max(peaks),
        stops={stop: count / len(group) for stop, count in stops.most_common()},
    )


def _average(drawn: Mapping[str, Mapping[str, _Drawn]], names: Sequence[str]) -> Average:
    return Average(tuple(names), {score: _of(drawn, names, score).interval for score in SCORES})


def _gap(
    drawn: Mapping[str, Mapping[str, _Drawn]], inside: Sequence[str], outside: Sequence[str], score: str
) -> Interval:
    first, second = _of(drawn, inside, score), _of(drawn, outside, score)
    return interval(first.mean - second.mean, first.mean_W - second.mean_W)


def _of(drawn: Mapping[str, Mapping[str, _Drawn]], names: Sequence[str], score: str) -> _Drawn:
    return _Drawn.average([drawn[name][score] for name in names])
