"""An evaluation on the terminal: what was right, and what it took."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memsearcher_jax.report.console import plain
from memsearcher_jax.report.evaluation import SCORES, Benchmark, Evaluation
from memsearcher_jax.report.intervals import LEVEL, Interval

LEAST_SHARE = 0.005  # of a reason to stop that is worth its place in the table


def show_evaluation(evaluation: Evaluation, console: Console) -> None:
    """Two tables with a row for each benchmark: scores in percent with their intervals, then turns, tokens, stops."""
    console.print(_score_table(evaluation))
    console.print(Text(f"percent; below, the {LEVEL:.0%} bootstrap interval over questions\n", style="dim"))
    console.print(_effort_table(evaluation.benchmarks))


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _score_table(evaluation: Evaluation) -> Table:
    table = _table("", "questions", *SCORES.values())
    for name, benchmark in evaluation.benchmarks.items():
        table.add_row(plain(name), f"{benchmark.questions:,}", *_cells(benchmark.scores))
    if len(evaluation.benchmarks) > 1:
        table.add_row()
        table.add_row("average", "", *_cells(evaluation.macro.scores))
    if evaluation.inside and evaluation.outside and evaluation.gap:
        table.add_row("in distribution", "", *_cells(evaluation.inside.scores))
        table.add_row("out of it", "", *_cells(evaluation.outside.scores))
        table.add_row("gap", "", *_cells(evaluation.gap))
    return table


def _cells(scores: Mapping[str, Interval]) -> list[Text]:
    cells = []
    for name in SCORES:
        one = scores[name]
        cells.append(Text(percent(one.mean)).append(f"\n{percent(one.low)}–{percent(one.high)}", style="dim"))
    return cells


def _effort_table(benchmarks: Mapping[str, Benchmark]) -> Table:
    table = _table("", "turns", "searches", "tokens\nper turn", "mean peak\ncontext", "largest", "why they ended")
    table.columns[-1].justify = "left"
    for name, one in benchmarks.items():
        table.add_row(
            plain(name),
            f"{one.turns:.2f}",
            f"{one.searches:.2f}",
            f"{one.tokens_per_turn:,.0f}",
            f"{one.mean_peak_context_tokens:,.0f}",
            f"{one.peak_context_tokens:,}",
            _stops(one.stops),
        )
    return table


def _stops(stops: Mapping[str, float]) -> str:
    shown = [f"{stop} {percent(share)}" for stop, share in stops.items() if share >= LEAST_SHARE]
    return ", ".join(shown)


def _table(*columns: str) -> Table:
    table = Table(*columns, box=None, header_style="dim", pad_edge=False, padding=(0, 1))
    for column in table.columns[1:]:
        column.justify = "right"
    return table
