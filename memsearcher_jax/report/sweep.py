"""Runs that differ in one setting: a table for the terminal, and plots of scores against tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from memsearcher_jax.report.console import safe_text
from memsearcher_jax.report.evaluation import ResultTable, show_table
from memsearcher_jax.report.labels import format_metric, label, percent
from memsearcher_jax.report.plots import COLORS, GREY, INK, save_png, style_axes
from memsearcher_jax.report.statistics import CONFIDENCE_LEVEL, mean

SCORES = ("exact_match", "f1", "cover_exact_match", "accuracy")  # in the table and the plots
EFFORT = ("turns", "searches", "tokens_per_turn", "mean_peak_context_tokens")
STREAM_EFFORT = ("stream_tokens", "memory_tokens", "compression", "calls_ok_share")


def sweep_row(value: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """One value of the setting, as JSON: macro averages over the benchmarks, or over the sources of streams.

        {"value", "questions" or streams, "scores": {name: {"mean", "low", "high"}}, and the names of `EFFORT`, or of
         `STREAM_EFFORT`; NaN for what is not known}

    `results`: the content of an evaluation's results.json.
    """
    benchmarks = list(results["evaluation"]["benchmarks"].values())
    names = STREAM_EFFORT if "stream_tokens" in benchmarks[0] else EFFORT
    effort = {name: mean([benchmark.get(name, math.nan) for benchmark in benchmarks]) for name in names}
    return {
        "value": value,
        "questions": sum(benchmark["questions"] for benchmark in benchmarks),
        "scores": results["evaluation"]["averages"]["macro"],
        **effort,
    }


def show_sweep(setting: str, rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print a table of `sweep_row`s."""
    scores = [name for name in SCORES if any(name in row["scores"] for row in rows)]
    effort = [name for name in (*EFFORT, *STREAM_EFFORT) if any(name in row for row in rows)]
    cells = []
    for row in rows:
        means = [percent(row["scores"][name]["mean"]) if name in row["scores"] else "?" for name in scores]
        costs = [format_metric(name, row.get(name, math.nan), 3) for name in effort]
        cells.append([row["value"], f"{row['questions']:,}", *means, *costs])
    columns = (setting.replace(".", ".\n"), "n", *map(label, (*scores, *effort)))
    show_table(ResultTable(setting, columns, cells), console)


def plot_sweep(path: Path, setting: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a PNG with a plot per score, in which each value of the setting is a dot at its tokens."""
    from matplotlib.figure import Figure

    tokens = "memory_tokens" if "memory_tokens" in rows[0] else "tokens_per_turn"
    scores = [name for name in SCORES if any(name in row["scores"] for row in rows)]
    figure = Figure((4.5 * max(1, len(scores)), 3.4), layout="constrained")
    for number, score in enumerate(scores, 1):
        axes = figure.add_subplot(1, len(scores), number)
        for row in rows:
            if interval := row["scores"].get(score):
                x = row.get(tokens, math.nan)
                y = interval["mean"]
                value = safe_text(row["value"]).plain
                axes.plot([x, x], [interval["low"], interval["high"]], color=GREY, linewidth=1.2)
                axes.plot(x, y, "o", color=COLORS[0], markersize=5)
                axes.annotate(value, (x, y), (5, 4), textcoords="offset points", parse_math=False)
        style_axes(axes, label(tokens), 0.0)
        title = f"{label(score)}, {CONFIDENCE_LEVEL:.0%} interval, by {safe_text(setting).plain}"
        axes.set_title(title, loc="left", fontsize=10, color=INK, parse_math=False)
    save_png(figure, path)
