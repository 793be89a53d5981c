"""Tables of the report page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from memsearcher_jax.jsonl import flatten
from memsearcher_jax.logs.metric_names import PHASE_PREFIX, STOP_PREFIX, MetricName
from memsearcher_jax.logs.metrics import Metrics
from memsearcher_jax.report.console import safe_text
from memsearcher_jax.report.evaluation import SHOWN, Cell, ResultTable, means_table, summarize
from memsearcher_jax.report.labels import format_metric, label, percent
from memsearcher_jax.report.memory_quality import TurnQuality, last_memory, metric_columns
from memsearcher_jax.report.page.run_data import TrajectoryGroup
from memsearcher_jax.report.statistics import mean, wilson_interval

LAST_STEPS = 10  # of training, averaged in the table of metrics
MAX_ROWS = 60  # a longer table is folded
MAIN = "main"
OTHER = "other"
FAMILIES = {
    OTHER: "Other metrics",
    STOP_PREFIX: "Stop reasons, fraction of trajectories",
    PHASE_PREFIX: "Seconds of each phase",
    "exact_match/": "Exact match by hops",
    "accuracy/": "Accuracy by source and kind of question",
    "wrong/": "Why answers are wrong, fraction of trajectories",
    "test/": "Evaluations during training",
    "calls/": "Tool calls by tool, per trajectory",
    "calls_failed/": "Failed tool calls by error, per trajectory",
    "memory_tokens/": "Tokens by part of the memory",
    "logprob_diff_mean/": "Sampler vs trainer by turn",
    "staleness/": "Contexts by the age of their policy in steps, fraction of contexts",
}
"""Headings of the families of metrics; the heading of another one is its prefix."""


def escape_html(text: object) -> str:
    """`text` for an HTML element or quoted attribute; invisible characters are shown as escapes."""
    return escape(safe_text(str(text)).plain)


def table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, note: str = "", max_rows: int = MAX_ROWS
) -> str:
    """A table whose first column labels the row and whose other cells are numbers; cells are HTML.

    With more than `max_rows` rows it is folded.
    """
    rows = list(rows)
    columns = "".join(f'<th scope="col">{escape_html(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>'
        for first, *others in rows
    )
    footer = f'<p class="note">{escape_html(note)}</p>' if note else ""
    title = escape_html(caption)
    # A wide table scrolls in its own frame; tabindex makes it reachable by keyboard.
    element = (
        f'<div class="table" tabindex="0" role="region" aria-label="{title}"><table>'
        f"<caption>{title}</caption><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>{footer}</div>"
    )
    return element if len(rows) <= max_rows else fold(caption, element)


def fold(summary: str, content: str) -> str:
    return f'<details class="metrics"><summary>{escape_html(summary)}</summary>{content}</details>'


def tiles(group: TrajectoryGroup, other: TrajectoryGroup | None) -> str:
    """The main metrics of a group, with those of the other group below."""
    others = summarize(other.summaries) if other else {}
    cells = []
    for name, value in summarize(group.summaries).items():
        if name in SHOWN:
            below = f"<small>{format_metric(name, others[name])} in the other</small>" if name in others else ""
            cells.append(f"<div><dt>{escape_html(label(name))}</dt><dd>{format_metric(name, value)}{below}</dd></div>")
    count = sum(not summary.stop.is_fault for summary in group.summaries)
    note = f"Means over {count:,} trajectories: {group.label}{f'; {other.label}' if other else ''}."
    return f'<dl class="tiles">{"".join(cells)}</dl><p class="note">{escape_html(note)}</p>'


def result_table(results: ResultTable) -> str:
    rows = [list(map(_cell_html, row)) for row in results.rows]
    return table(results.title, results.columns, rows, note=results.note)


def _cell_html(cell: Cell) -> str:
    if isinstance(cell, str):
        return escape_html(cell)
    mean, low, high = cell
    return f"{mean} <small>{low} to {high}</small>"


def steps_tables(steps: Sequence[Metrics]) -> str:
    """Every metric of a training run: the main ones, and a folded table for each family of the others, "NAME/..."."""
    families: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for metrics in steps for name in metrics if name != "step"):
        families.setdefault(_family(name), []).append(name)
    caption = f"Metrics of {len(steps):,} steps"
    main = _steps_table(caption, families.pop(MAIN, []), steps)
    headings = {family: FAMILIES.get(family, family) for family in families}
    return main + "".join(
        fold(headings[family], _steps_table(f"{caption}: {headings[family]}", members, steps))
        for family, members in families.items()
    )


def _family(name: str) -> str:
    if name in set(MetricName):
        return MAIN
    prefix, slash, _ = name.partition("/")
    return prefix + slash if slash else OTHER


def _steps_table(caption: str, names: Sequence[str], steps: Sequence[Metrics]) -> str:
    """First and last value, mean of the last steps, minimum and maximum."""
    rows = []
    for name in names:
        values = [metrics[name] for metrics in steps if name in metrics]
        finite = [value for value in values if math.isfinite(value)]
        last = [value for value in values[-LAST_STEPS:] if math.isfinite(value)]
        rows.append(
            (
                escape_html(label(name)),
                _step_value(name, values[0]),
                _step_value(name, values[-1]),
                format_metric(name, mean(last)),
                format_metric(name, min(finite, default=math.nan)),
                format_metric(name, max(finite, default=math.nan)),
            )
        )
    head = ("metric", "first", "last", f"mean of last {LAST_STEPS}", "min", "max")
    return table(caption, head, rows, max_rows=len(rows))


def share(fraction: float, color: int, note: str, low: float = 0.0, high: float = 0.0) -> str:
    """A fraction as a bar, with the line of its interval, and in percent, with a note."""
    return (
        '<svg class="share" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="track" width="100" height="8"/>'
        f'<rect class="fill c{color}" width="{100 * fraction:.2f}" height="8"/>'
        f'<rect class="interval" x="{100 * low:.2f}" y="3" width="{100 * (high - low):.2f}" height="2"/></svg>'
        f"{percent(fraction)} % <small>{note}</small>"
    )


def stops_table(groups: Sequence[TrajectoryGroup]) -> str:
    """Stop reasons that occurred, the most frequent first."""
    counts = [Counter(summary.stop for summary in group.summaries) for group in groups]
    rows = []
    for stop, _ in sum(counts, Counter()).most_common():
        description = escape_html(stop.description)
        cells = [f'<code>{escape_html(stop.value)}</code><br><span class="description">{description}</span>']
        for color, (group, count) in enumerate(zip(groups, counts, strict=True)):
            cells.append(share(count[stop] / len(group.summaries), color, f"{count[stop]:,}"))
        rows.append(cells)
    return table("Stop reasons", ("reason", *(group.label for group in groups)), rows)


def accuracy_table(groups: Sequence[TrajectoryGroup], name: str) -> str:
    """Exact match with its interval for each value of a field; "" if no scored trajectory has one."""
    scored = [[summary for summary in group.summaries if summary.correct is not None] for group in groups]
    values = {getattr(summary, name) for summaries in scored for summary in summaries} - {None}
    rows = []
    for value in sorted(values):
        cells = [str(value)]
        for color, summaries in enumerate(scored):
            correct = [bool(summary.correct) for summary in summaries if getattr(summary, name) == value]
            if not correct:
                cells.append("–")
                continue
            low, high = wilson_interval(sum(correct), len(correct))
            note = f"{percent(low)} to {percent(high)}, n {len(correct):,}"
            cells.append(share(sum(correct) / len(correct), color, note, low, high))
        rows.append(cells)
    note = "Exact match, 95 % Wilson intervals."
    header = (name, *(group.label for group in groups))
    return table(f"Accuracy by {name}", header, rows, note=note) if rows else ""


def datasets_table(groups: Sequence[TrajectoryGroup]) -> str:
    """The means of each dataset; "" for a single dataset."""
    means: dict[str, dict[str, float]] = {}
    datasets = sorted({summary.dataset for group in groups for summary in group.summaries})
    for group in groups:
        for name in datasets:
            chosen = [summary for summary in group.summaries if summary.dataset == name]
            if chosen:
                dataset = name or "unnamed"
                title = f"{dataset}, {group.label}" if len(groups) > 1 else dataset
                means[title] = {"n": sum(not summary.stop.is_fault for summary in chosen)} | summarize(chosen)
    if len(datasets) < 2:
        return ""
    return result_table(means_table("Results by dataset", ("n", *SHOWN), means))


def memory_table(qualities: Sequence[Sequence[TurnQuality]]) -> str:
    """The metrics of docs/evaluate.md over the page's trajectories; "" if none wrote a memory."""
    if not any(turn.wrote_memory for turns in qualities for turn in turns):
        return ""
    over_turns = metric_columns(turn.metrics for turns in qualities for turn in turns)
    at_the_end = metric_columns(map(last_memory, qualities))
    rows = []
    for name in over_turns:
        columns = (over_turns[name], at_the_end.get(name, []))
        cells = [f"{format_metric(name, mean(values))} <small>n {len(values):,}</small>" for values in columns]
        rows.append([label(name), *cells])
    note = f"Means over the turns, and over the last memories, of {len(qualities):,} trajectories; n have the metric."
    return table("Memory quality", ("metric", "all turns", "last memory"), rows, note=note)


def settings_table(settings: dict[str, Any], other: dict[str, Any] | None) -> str:
    """Every setting of run.json; with another run's, different settings come first and are highlighted."""
    first = flatten(settings)
    second = flatten(other or {})
    if other is None:
        rows = [(escape_html(name), escape_html(value)) for name, value in first.items()]
        return table("Settings", ("setting", "value"), rows, max_rows=len(rows))
    differing = {name for name in first | second if first.get(name) != second.get(name)}
    rows = []
    for name in sorted(first | second, key=lambda name: name not in differing):
        heading = f"<mark>{escape_html(name)}</mark>" if name in differing else escape_html(name)
        rows.append((heading, escape_html(first.get(name, "–")), escape_html(second.get(name, "–"))))
    return table("Settings, differences first", ("setting", "this run", "the other"), rows, max_rows=len(rows))


def _step_value(name: str, value: float) -> str:
    """A non-finite value is shown, unlike a metric that was not measured."""
    return format_metric(name, value) if math.isfinite(value) else f'<em class="alarm">{escape_html(value)}</em>'
