"""Evaluations that differ in one setting: a table for the terminal, and a page with accuracy against tokens."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from memsearcher_jax.report import page_tables
from memsearcher_jax.report.console import plain
from memsearcher_jax.report.evaluation import SCORES, Evaluation
from memsearcher_jax.report.files import replacing
from memsearcher_jax.report.intervals import LEVEL, Interval
from memsearcher_jax.report.page import policy, web_file
from memsearcher_jax.report.page_facts import mean
from memsearcher_jax.report.page_svg import Line, line_chart, markup

PLOTTED = ("exact_match", "f1", "cover_exact_match")
EFFORT = {
    "turns": "turns",
    "searches": "searches",
    "tokens_per_turn": "tokens per turn",
    "mean_peak_context_tokens": "peak context",
}
"""What answering took, and what it is called."""


@dataclass(frozen=True)
class Point:
    """One value of the setting: macro averages over the benchmarks."""

    value: str
    questions: int
    scores: dict[str, Interval]
    effort: dict[str, float]  # by the keys of EFFORT

    @classmethod
    def of(cls, value: str, evaluation: Evaluation) -> Point:
        benchmarks = evaluation.benchmarks.values()
        return cls(
            value,
            sum(one.questions for one in benchmarks),
            evaluation.macro.scores,
            {name: mean([getattr(one, name) for one in benchmarks]) for name in EFFORT},
        )


def show_sweep(setting: str, points: Sequence[Point], console: Console) -> None:
    """One row for each value of the setting."""
    heads = ["n", *(SCORES[name] for name in PLOTTED), *(name.replace(" ", "\n", 1) for name in EFFORT.values())]
    table = Table(setting.replace(".", ".\n"), *heads, box=None, header_style="dim", pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for point in points:
        scores = [f"{100 * point.scores[name].mean:.1f}" for name in PLOTTED]
        table.add_row(plain(point.value), f"{point.questions:,}", *scores, *map(_amount, point.effort.values()))
    console.print(table)


def write_sweep_page(path: Path, setting: str, points: Sequence[Point], about: str) -> None:
    """One HTML file that needs no network and runs no script: the plot and the table."""
    style = web_file("page.css")
    page = string.Template(web_file("sweep.html")).substitute(
        policy=policy(style),
        style=style,
        title=markup(f"{setting}: {', '.join(point.value for point in points)}"),
        about=markup(about),
        plots="\n".join(_plot(setting, points, score, color) for color, score in enumerate(PLOTTED)),
        table=_table(setting, points),
    )
    with replacing(path) as file:
        file.write(page.encode("utf-8"))


def _plot(setting: str, points: Sequence[Point], score: str, color: int) -> str:
    """One dot for each value: more tokens to the right, a better score higher up. No line joins them: the values of a
    setting have no order that tokens would follow."""
    ordered = sorted(points, key=lambda point: point.effort["tokens_per_turn"])
    across = [(point.effort["tokens_per_turn"], point.scores[score]) for point in ordered]
    dots = Line(
        SCORES[score],
        [(x, one.mean) for x, one in across],
        [(x, one.low, one.high) for x, one in across],
        color=color,
        names=[point.value for point in ordered],
        joined=False,
    )
    unit = f"mean over questions, {LEVEL:.0%} interval; beside it {setting}"
    return line_chart(f"{SCORES[score]} against tokens", unit, "tokens per turn", [dots], floor=0)


def _table(setting: str, points: Sequence[Point]) -> str:
    rows = [
        [
            markup(point.value),
            f"{point.questions:,}",
            *(_with_interval(point.scores[name]) for name in SCORES),
            *map(_amount, point.effort.values()),
        ]
        for point in points
    ]
    note = f"Percent with {LEVEL:.0%} bootstrap intervals over questions; each benchmark counts the same."
    return page_tables.table("By value", _head(setting), rows, note=note)


def _head(setting: str) -> list[str]:
    return [setting, "questions", *SCORES.values(), *EFFORT.values()]


def _with_interval(one: Interval) -> str:
    return f"{100 * one.mean:.1f} <small>{100 * one.low:.1f} to {100 * one.high:.1f}</small>"


def _amount(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def sweep_json(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The rows of the table, for JSON."""
    return [
        {"value": point.value, "questions": point.questions, "scores": _plain_scores(point.scores), **point.effort}
        for point in points
    ]


def _plain_scores(scores: Mapping[str, Interval]) -> dict[str, dict[str, float]]:
    return {name: {"mean": one.mean, "low": one.low, "high": one.high} for name, one in scores.items()}
