"""Runs that differ in one setting: a table for the terminal, and plots of scores against tokens."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.report.console import make_table, safe_text
from memsearcher_jax.report.labels import format_metric, label, percent
from memsearcher_jax.report.plots import COLORS, FAINT, INK, style_axes
from memsearcher_jax.report.statistics import CONFIDENCE_LEVEL, Interval, mean

SCORES = ("exact_match", "f1", "cover_exact_match", "accuracy")  # in the table and the plots
EFFORT = ("turns", "searches", "tokens_per_turn", "mean_peak_context_tokens")
STREAM_EFFORT = ("stream_tokens", "memory_tokens", "compression", "calls_ok_share")


@dataclass(frozen=True)
class SweepPoint:
    """One value of the setting, with macro averages over the benchmarks, or over the sources of streams."""

    value: str
    questions: int  # or streams
    scores: dict[str, Interval]  # without those that no question has
    effort: dict[str, float]  # the names of EFFORT, or of STREAM_EFFORT

    @classmethod
    def from_results(cls, value: str, results: Mapping[str, Any]) -> SweepPoint:
        """`results`: the content of an evaluation's results.json."""
        benchmarks = list(results["evaluation"]["benchmarks"].values())
        names = STREAM_EFFORT if "stream_tokens" in benchmarks[0] else EFFORT
        scores = {name: Interval(**one) for name, one in results["evaluation"]["averages"]["macro"].items()}
        effort = {name: mean([math.nan if one[name] is None else one[name] for one in benchmarks]) for name in names}
        return cls(value, sum(benchmark["questions"] for benchmark in benchmarks), scores, effort)

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        return {**fields.pop("effort"), **fields}


def show_sweep(setting: str, points: Sequence[SweepPoint], console: Console) -> None:
    """Print a table with a row per value of the setting."""
    scores = [name for name in SCORES if any(name in point.scores for point in points)]
    labels = (label(name).replace(" ", "\n", 1) for name in (*scores, *points[0].effort))
    table = make_table(setting.replace(".", ".\n"), "n", *labels)
    for point in points:
        means = [percent(point.scores[name].mean) if name in point.scores else "?" for name in scores]
        effort = [format_metric(name, value, 3) for name, value in point.effort.items()]
        table.add_row(safe_text(point.value), f"{point.questions:,}", *means, *effort)
    console.print(table)


def plot_sweep(path: Path, setting: str, points: Sequence[SweepPoint]) -> None:
    """Write a PNG with a plot per score, in which each value of the setting is a dot at its tokens."""
    from matplotlib.figure import Figure

    tokens = "memory_tokens" if "memory_tokens" in points[0].effort else "tokens_per_turn"
    scores = [name for name in SCORES if any(name in point.scores for point in points)]
    figure = Figure((4.5 * max(1, len(scores)), 3.4), layout="constrained")
    for number, score in enumerate(scores, 1):
        axes = figure.add_subplot(1, len(scores), number)
        for point in points:
            if score in point.scores:
                x, interval = point.effort[tokens], point.scores[score]
                axes.plot([x, x], [interval.low, interval.high], color=FAINT, linewidth=1.2)
                axes.plot(x, interval.mean, "o", color=COLORS[0], markersize=5)
                value = safe_text(point.value).plain
                axes.annotate(value, (x, interval.mean), (5, 4), textcoords="offset points", parse_math=False)
        style_axes(axes, label(tokens), 0.0)
        title = f"{label(score)}, {CONFIDENCE_LEVEL:.0%} interval, by {safe_text(setting).plain}"
        axes.set_title(title, loc="left", fontsize=10, color=INK, parse_math=False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    atomic_write(path, content.getvalue())
