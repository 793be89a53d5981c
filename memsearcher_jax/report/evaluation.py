"""Results of an evaluation: per benchmark, macro average, in- and out-of-distribution, as data and as tables.

Means have percentile bootstrap intervals over questions (report/statistics.py). An average over benchmarks is a macro
average: each benchmark has the same weight, whatever its number of questions. Its interval resamples the questions of
each benchmark, for a fixed choice of benchmarks.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from memsearcher_jax.jsonl import parse_object
from memsearcher_jax.report.console import make_table, safe_text
from memsearcher_jax.report.statistics import (
    CONFIDENCE_LEVEL,
    N_RESAMPLES,
    Interval,
    mean,
    percentile_interval,
    resampled_means,
)
from memsearcher_jax.types import TrajectorySummary

RESULTS_FILE = "results.json"  # written when an evaluation is finished
WEIGHTS_FILE = "weights.json"  # the checkpoint that was evaluated: a run that trains on has a newer one later
SCORES = {
    "exact_match": "EM",
    "f1": "F1",
    "cover_exact_match": "cover-EM",
    "precision": "precision",
    "recall": "recall",
}
"""The scores of an answer, with their labels."""
MIN_STOP_FRACTION = 0.005  # rarer stop reasons are not printed


def read_results(folder: Path) -> dict[str, Any]:
    """The results of the finished evaluation in `folder`. Raises FileNotFoundError or ValueError in one line."""
    file = folder / RESULTS_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no {RESULTS_FILE}: name a folder that launch/evaluate.py wrote")
    return parse_object(str(file), file.read_bytes())


@dataclass(frozen=True)
class BenchmarkResult:
    """All numbers but `lost` are of the questions that were not lost to faults of the machinery."""

    questions: int
    scores: dict[str, Interval]  # by the keys of SCORES
    turns: float  # mean over questions
    searches: float  # mean over questions
    tokens_per_turn: float  # in the context at the end of a turn, mean over turns; 0 without turns
    mean_peak_context_tokens: float  # of a question's longest context, mean over questions
    peak_context_tokens: int  # of the longest context
    stops: dict[str, float]  # fraction of each stop reason, the most frequent first
    lost: int = 0


@dataclass(frozen=True)
class MacroAverage:
    benchmarks: tuple[str, ...]
    scores: dict[str, Interval]


@dataclass(frozen=True)
class EvaluationResult:
    """`gap` is in-distribution minus out-of-distribution; these three are None if one of the two is empty."""

    benchmarks: dict[str, BenchmarkResult]
    macro: MacroAverage
    in_distribution: MacroAverage | None
    out_of_distribution: MacroAverage | None
    gap: dict[str, Interval] | None

    def to_json(self) -> dict[str, Any]:
        return {"confidence_level": CONFIDENCE_LEVEL, "n_resamples": N_RESAMPLES, **asdict(self)}


def summarize_evaluation(
    summaries: Sequence[TrajectorySummary],
    *,
    in_distribution: Collection[str],
    default_dataset: str = "questions",
    seed: int = 0,
) -> EvaluationResult:
    """The results of an evaluation.

    Args:
      summaries: one per question; `dataset` names the benchmark.
      in_distribution: names of the benchmarks that the policy was trained on.
      default_dataset: name of the benchmark of questions without one.
      seed: of the resampling. Each benchmark has its own generator, so its intervals do not depend on the others.

    Raises:
      ValueError: there are no questions, or none that was not lost, or one lacks a score.
    """
    lost = Counter(summary.dataset or default_dataset for summary in summaries if summary.stop.is_fault)
    summaries = [summary for summary in summaries if not summary.stop.is_fault]
    if not summaries:
        raise ValueError(f"the evaluation has no questions besides {lost.total()} that were lost to faults")
    groups: dict[str, list[TrajectorySummary]] = {}
    for summary in summaries:
        if missing := [name for name in SCORES if name not in summary.scores]:
            raise ValueError(f"a trajectory has no score {missing[0]}, an older version wrote it: evaluate again")
        groups.setdefault(summary.dataset or default_dataset, []).append(summary)
    bootstraps = {
        name: {score: _bootstrap(name, score, group, seed) for score in SCORES} for name, group in groups.items()
    }

    def average(names: Sequence[str]) -> dict[str, np.ndarray]:
        return {score: np.mean([bootstraps[name][score] for name in names], axis=0) for score in SCORES}

    seen = [name for name in groups if name in in_distribution]
    unseen = [name for name in groups if name not in in_distribution]
    seen_average = unseen_average = gap = None
    if seen and unseen:
        first, second = average(seen), average(unseen)
        seen_average = MacroAverage(tuple(seen), _intervals(first))
        unseen_average = MacroAverage(tuple(unseen), _intervals(second))
        gap = _intervals({score: first[score] - second[score] for score in SCORES})
    benchmarks = {name: _benchmark_result(group, lost[name], bootstraps[name]) for name, group in groups.items()}
    macro = MacroAverage(tuple(groups), _intervals(average(list(groups))))
    return EvaluationResult(benchmarks, macro, seen_average, unseen_average, gap)


def show_evaluation(evaluation: EvaluationResult, console: Console) -> None:
    """Print two tables with a row per benchmark: scores with their intervals; turns, tokens and stop reasons."""
    scores = make_table("", "questions", *SCORES.values())
    for name, result in evaluation.benchmarks.items():
        scores.add_row(safe_text(name), f"{result.questions:,}", *map(_score_cell, result.scores.values()))
    averages = {"average": evaluation.macro.scores} if len(evaluation.benchmarks) > 1 else {}
    if evaluation.in_distribution and evaluation.out_of_distribution and evaluation.gap:
        averages["in distribution"] = evaluation.in_distribution.scores
        averages["out of distribution"] = evaluation.out_of_distribution.scores
        averages["gap"] = evaluation.gap
    if averages:
        scores.add_row()
    for name, intervals in averages.items():
        scores.add_row(name, "", *map(_score_cell, intervals.values()))
    console.print(scores)
    console.print(Text(f"percent, with the {CONFIDENCE_LEVEL:.0%} bootstrap interval over questions\n", style="dim"))

    columns = ("turns", "searches", "tokens\nper turn", "mean peak\ncontext", "largest\ncontext", "stop reasons")
    effort = make_table("", *columns, left=columns[-1:])
    for name, result in evaluation.benchmarks.items():
        stops = [f"{stop} {percent(share)}" for stop, share in result.stops.items() if share >= MIN_STOP_FRACTION]
        stops += [f"{result.lost} questions lost"] * bool(result.lost)
        effort.add_row(
            safe_text(name),
            f"{result.turns:.2f}",
            f"{result.searches:.2f}",
            f"{result.tokens_per_turn:,.0f}",
            f"{result.mean_peak_context_tokens:,.0f}",
            f"{result.peak_context_tokens:,}",
            ", ".join(stops),
        )
    console.print(effort)


def percent(fraction: float) -> str:
    return "?" if math.isnan(fraction) else f"{100 * fraction:.1f}"


def _score_cell(interval: Interval) -> Text:
    return Text(percent(interval.mean)).append(f"\n{percent(interval.low)}–{percent(interval.high)}", style="dim")


def _bootstrap(name: str, score: str, group: Sequence[TrajectorySummary], seed: int) -> np.ndarray:
    """The mean, then the means of its resamples."""
    rng = np.random.default_rng([seed, zlib.crc32(f"{name}/{score}".encode())])
    value_N = np.array([summary.scores[score] for summary in group])
    return np.append(value_N.mean(), resampled_means(value_N, rng))


def _intervals(bootstraps: Mapping[str, np.ndarray]) -> dict[str, Interval]:
    return {score: percentile_interval(mean_W[0], mean_W[1:]) for score, mean_W in bootstraps.items()}


def _benchmark_result(
    group: Sequence[TrajectorySummary], lost: int, bootstraps: Mapping[str, np.ndarray]
) -> BenchmarkResult:
    lengths = [tokens for summary in group for tokens in summary.context_lengths]
    peaks = [max(summary.context_lengths, default=0) for summary in group]
    stops = Counter(summary.stop.value for summary in group)
    return BenchmarkResult(
        questions=len(group),
        scores=_intervals(bootstraps),
        turns=mean([summary.turns for summary in group]),
        searches=mean([summary.searches for summary in group]),
        tokens_per_turn=mean(lengths) if lengths else 0.0,
        mean_peak_context_tokens=mean(peaks),
        peak_context_tokens=max(peaks),
        stops={stop: count / len(group) for stop, count in stops.most_common()},
        lost=lost,
    )
