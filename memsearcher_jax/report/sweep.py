"""Runs that differ in one setting: a table for the terminal, and a page with scores against tokens."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.report.console import make_table, safe_text
from memsearcher_jax.report.evaluation import SCORES, percent
from memsearcher_jax.report.page import tables
from memsearcher_jax.report.page.html import content_security_policy, web_file
from memsearcher_jax.report.page.svg import N_COLORS, Line, escape_html, line_chart
from memsearcher_jax.report.statistics import CONFIDENCE_LEVEL, Interval, mean, percentile_interval, resampled_means
from memsearcher_jax.report.stream_evaluation import known_scores, summarize_streams
from memsearcher_jax.types import TrajectorySummary

PLOTTED_SCORES = ("exact_match", "f1", "cover_exact_match")
EFFORT = {
    "turns": "turns",
    "searches": "searches",
    "tokens_per_turn": "tokens per turn",
    "mean_peak_context_tokens": "peak context",
}
"""The cost of an answer: fields of `BenchmarkResult`, with their labels."""
STREAM_EFFORT = {
    "stream_tokens": "tokens of the stream",
    "memory_tokens": "tokens of the memory",
    "compression": "compression",
    "ok": "successful calls",
}
"""The cost of a memory: fields of `StreamResult`, with their labels."""
LABELS = SCORES | {"accuracy": "accuracy"} | EFFORT | STREAM_EFFORT
X_AXES = ("tokens_per_turn", "memory_tokens")  # the first that the points have


@dataclass(frozen=True)
class SweepPoint:
    """One value of the setting, with macro averages over the benchmarks, or over the sources of streams."""

    value: str
    questions: int
    scores: dict[str, Interval]
    effort: dict[str, float]  # by the keys of EFFORT or STREAM_EFFORT
    curve: tuple[float, ...] = ()  # of training, by step: exact match, or the reward; a running mean

    @classmethod
    def from_evaluation(cls, value: str, results: Mapping[str, Any]) -> SweepPoint:
        """`results`: the content of results.json."""
        benchmarks, scores = results["evaluation"]["benchmarks"].values(), results["evaluation"]["macro"]["scores"]
        return cls(
            value,
            results["questions"],
            {name: Interval(**interval) for name, interval in scores.items()},
            {name: mean([benchmark[name] for benchmark in benchmarks]) for name in EFFORT},
        )

    @classmethod
    def from_streams(cls, value: str, summaries: Sequence[TrajectorySummary], seed: int) -> SweepPoint:
        """Accuracy with a bootstrap interval over the streams within each source; unscored streams enter no mean."""
        results = summarize_streams(summaries)
        names = dict.fromkeys(summary.dataset for summary in summaries)
        sources = [results[name] for name in names]
        groups = ([summary for summary in summaries if summary.dataset == name] for name in names)
        scored = [scores for group in groups if (scores := known_scores(group, "accuracy"))]
        rng, accuracy = np.random.default_rng(seed), Interval(math.nan, math.nan, math.nan)
        if scored:
            mean_W = np.mean([resampled_means(scores, rng) for scores in scored], axis=0)
            accuracy = percentile_interval(mean([mean(scores) for scores in scored]), mean_W)
        effort = {name: mean([getattr(source, name) for source in sources]) for name in STREAM_EFFORT}
        return cls(value, sum(source.questions for source in sources), {"accuracy": accuracy}, effort)

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        effort = fields.pop("effort")
        return {**fields, **effort}


def show_sweep(setting: str, points: Sequence[SweepPoint], console: Console) -> None:
    """Print a table with a row per value of the setting."""
    plotted, effort = _plotted(points[0]), points[0].effort
    labels = (*(LABELS[name] for name in plotted), *(LABELS[name].replace(" ", "\n", 1) for name in effort))
    table = make_table(setting.replace(".", ".\n"), "n", *labels)
    for point in points:
        scores = [percent(point.scores[name].mean) for name in plotted]
        table.add_row(safe_text(point.value), f"{point.questions:,}", *scores, *map(_format, point.effort.values()))
    console.print(table)


def write_sweep_page(path: Path, setting: str, points: Sequence[SweepPoint], about: str) -> None:
    """Write a self-contained HTML page, without scripts, with the plots and the table."""
    style = web_file("page.css")
    rows = [
        [
            escape_html(point.value),
            f"{point.questions:,}",
            *map(_with_interval, point.scores.values()),
            *map(_format, point.effort.values()),
        ]
        for point in points
    ]
    scored, groups = ("streams", "sources") if "accuracy" in points[0].scores else ("questions", "benchmarks")
    note = f"Percent with {CONFIDENCE_LEVEL:.0%} bootstrap intervals over {scored}; macro averages over {groups}."
    page = string.Template(web_file("sweep.html")).substitute(
        policy=content_security_policy(style),
        style=style,
        title=escape_html(f"{setting}: {', '.join(point.value for point in points)}"),
        about=escape_html(about),
        plots="\n".join([*_curves(points), *(_plot(setting, points, *one) for one in enumerate(_plotted(points[0])))]),
        table=tables.table(
            "Results by value",
            [setting, "questions", *(LABELS[name] for name in (*points[0].scores, *points[0].effort))],
            rows,
            note=note,
        ),
    )
    atomic_write(path, page.encode("utf-8"))


def _plotted(point: SweepPoint) -> list[str]:
    """The scores that are plotted and printed."""
    return [name for name in point.scores if name in PLOTTED_SCORES] or list(point.scores)


def _curves(points: Sequence[SweepPoint]) -> list[str]:
    """A figure with a line per value, if the values were trained."""
    lines = [
        Line(point.value, list(enumerate(point.curve)), color=color % N_COLORS)
        for color, point in enumerate(points)
        if len(point.curve) > 1
    ]
    unit = "exact match of the step's trajectories, or their reward; running mean"
    return [line_chart("Learning curves", unit, "step", lines, y_min=0)] if lines else []


def _plot(setting: str, points: Sequence[SweepPoint], color: int, score: str) -> str:
    """A dot per value at its tokens. Dots are not connected: values need not be ordered by tokens."""
    tokens = next(name for name in X_AXES if name in points[0].effort)
    ordered = sorted(points, key=lambda point: point.effort[tokens])
    data = [(point.effort[tokens], point.scores[score]) for point in ordered]
    dots = Line(
        LABELS[score],
        [(x, interval.mean) for x, interval in data],
        [(x, interval.low, interval.high) for x, interval in data],
        color=color,
        point_labels=[point.value for point in ordered],
        connected=False,
    )
    unit = f"mean, {CONFIDENCE_LEVEL:.0%} interval; labels: {setting}"
    return line_chart(f"{LABELS[score]} against tokens", unit, LABELS[tokens], [dots], y_min=0)


def _with_interval(interval: Interval) -> str:
    return f"{percent(interval.mean)} <small>{percent(interval.low)} to {percent(interval.high)}</small>"


def _format(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"
