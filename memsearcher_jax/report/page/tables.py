"""Tables of the report page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from memsearcher_jax.jsonl import flatten
from memsearcher_jax.logs.metric_names import PHASE_PREFIX, STOP_PREFIX, MetricName
from memsearcher_jax.logs.metrics import Metrics
from memsearcher_jax.report.console import STOP_DESCRIPTIONS, format_number
from memsearcher_jax.report.memory_quality import TrajectoryQuality, mean_metrics
from memsearcher_jax.report.page.run_data import RunData, TrajectoryGroup
from memsearcher_jax.report.page.svg import escape_html, share_bar
from memsearcher_jax.report.statistics import mean, wilson_interval
from memsearcher_jax.types import StopReason, TrajectorySummary

LAST_STEPS = 10  # of training, averaged in the table of metrics
MAIN, OTHER = "main", "other"
FAMILIES = {
    OTHER: "Other metrics",
    STOP_PREFIX: "Stop reasons, fraction of trajectories",
    PHASE_PREFIX: "Seconds of each phase",
    "exact_match/": "Exact match by hops",
    "test/": "Evaluations during training",
}
"""Headings of the families of metrics; the heading of another one is its prefix."""

SUMMARY_SCORES = {"exact_match": "exact match", "f1": "F1", "cover_exact_match": "cover exact match"}


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, note: str = "") -> str:
    """A table whose first column labels the row and whose other cells are numbers; cells are HTML."""
    columns = "".join(f'<th scope="col">{escape_html(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>'
        for first, *others in rows
    )
    footer = f'<p class="note">{escape_html(note)}</p>' if note else ""
    label = escape_html(caption)
    # A wide table scrolls in its own frame; tabindex makes it reachable by keyboard.
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{label}"><table>'
        f"<caption>{label}</caption><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>{footer}</div>"
    )


def summary_metrics(summaries: Sequence[TrajectorySummary]) -> dict[str, float]:
    """Means over trajectories (tokens per turn: over turns), without scores that no trajectory has."""
    lengths = [tokens for summary in summaries for tokens in summary.context_lengths]
    scores = {
        label: mean([summary.scores[name] for summary in summaries if name in summary.scores])
        for name, label in SUMMARY_SCORES.items()
        if any(name in summary.scores for summary in summaries)
    }
    return scores | {
        "reward": mean([summary.reward for summary in summaries if not math.isnan(summary.reward)]),
        "answered": mean([summary.stop is StopReason.ANSWERED for summary in summaries]),
        "turns": mean([summary.turns for summary in summaries]),
        "searches": mean([summary.searches for summary in summaries]),
        "tokens per turn": mean(lengths),
        "peak context": float(max(lengths, default=0)),
    }


def results_table(run: RunData, other: RunData | None) -> str:
    """The metrics of results.json; with another evaluation, also its metrics and the differences."""
    first, second = (
        {name: value for name, value in one.results.get("metrics", {}).items() if value is not None} if one else {}
        for one in (run, other)
    )
    names = [name for name in (first | second) if not name.startswith(STOP_PREFIX)]
    if not (other and second):
        return table("Metrics", ("metric", "value"), [(_label(name), format_number(first[name])) for name in names])
    rows = []
    for name in names:
        a, b = first.get(name, math.nan), second.get(name, math.nan)
        rows.append((_label(name), format_number(a), format_number(b), "–" if math.isnan(a - b) else f"{a - b:+,.4g}"))
    return table("Metrics", ("metric", run.name, other.name, "difference"), rows)


def steps_tables(steps: Sequence[Metrics]) -> str:
    """Every metric of a training run: the main ones, and a folded table for each family of the others, "NAME/..."."""
    families: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for metrics in steps for name in metrics if name != "step"):
        prefix, slash, _ = name.partition("/")
        family = MAIN if name in set(MetricName) else prefix + slash if slash else OTHER
        families.setdefault(family, []).append(name)
    caption = f"Metrics of {len(steps):,} steps"
    main = _steps_table(caption, families.pop(MAIN, []), steps)
    folded = (
        f'<details class="metrics"><summary>{escape_html(FAMILIES.get(family, family))}</summary>'
        f"{_steps_table(f'{caption}: {family}', members, steps)}</details>"
        for family, members in families.items()
    )
    return main + "".join(folded)


def _steps_table(caption: str, names: Sequence[str], steps: Sequence[Metrics]) -> str:
    """First and last value, mean of the last steps, minimum and maximum."""
    rows = []
    for name in names:
        values = [metrics[name] for metrics in steps if name in metrics]
        finite = [value for value in values if math.isfinite(value)]
        last = [value for value in values[-LAST_STEPS:] if math.isfinite(value)]
        ends = (format_number(min(finite)), format_number(max(finite))) if finite else ("–", "–")
        rows.append((_label(name), _step_value(values[0]), _step_value(values[-1]), format_number(mean(last)), *ends))
    return table(caption, ("metric", "first", "last", f"mean of last {LAST_STEPS}", "min", "max"), rows)


def stops_table(groups: Sequence[TrajectoryGroup]) -> str:
    """Stop reasons that occurred, the most frequent first."""
    counts = [Counter(summary.stop for summary in group.summaries) for group in groups]
    rows = []
    for stop, _ in sum(counts, Counter()).most_common():
        description = escape_html(STOP_DESCRIPTIONS[stop])
        cells = [f'<code>{escape_html(stop.value)}</code><br><span class="description">{description}</span>']
        for color, (group, count) in enumerate(zip(groups, counts, strict=True)):
            fraction = count[stop] / len(group.summaries)
            cells.append(f"{share_bar(fraction, color)}{100 * fraction:.1f}% <small>{count[stop]:,}</small>")
        rows.append(cells)
    return table("Stop reasons", ("reason", *(group.label for group in groups)), rows)


def accuracy_table(groups: Sequence[TrajectoryGroup], name: str) -> str:
    """Exact match with its interval for each value of a field; "" if no scored trajectory has one."""
    rows = []
    for value, counts in correct_counts(groups, name).items():
        cells = [str(value)]
        for correct, total in counts:
            low, high = wilson_interval(correct, total)
            cell = f"{correct / total:.3f} <small>{low:.2f} to {high:.2f}, n {total:,}</small>" if total else "–"
            cells.append(cell)
        rows.append(cells)
    note = "Exact match, 95% Wilson intervals."
    header = (name, *(group.label for group in groups))
    return table(f"Accuracy by {name}", header, rows, note=note) if rows else ""


def datasets_table(groups: Sequence[TrajectoryGroup]) -> str:
    """The means of each dataset; "" for a single dataset."""
    summaries = [summary for group in groups for summary in group.summaries]
    datasets = sorted({summary.dataset for summary in summaries})
    if len(datasets) < 2:
        return ""
    columns, rows = list(summary_metrics(summaries)), []
    for group in groups:
        for name in datasets:
            if chosen := [summary for summary in group.summaries if summary.dataset == name]:
                metrics = summary_metrics(chosen)  # without scores, if all of them were lost
                title = escape_html(name or "unnamed")
                if len(groups) > 1:
                    title += f" <small>{escape_html(group.label)}</small>"
                cells = [format_number(metrics.get(column, math.nan)) for column in columns]
                rows.append([title, f"{len(chosen):,}", *cells])
    return table("Results by dataset", ("dataset", "questions", *columns), rows)


def memory_table(qualities: Sequence[TrajectoryQuality]) -> str:
    """The metrics of docs/memory_quality.md over the page's trajectories; "" if none wrote a memory."""
    if not any(turn.wrote_memory for quality in qualities for turn in quality.turns):
        return ""
    over_turns = mean_metrics(turn.metrics for quality in qualities for turn in quality.turns)
    at_the_end = mean_metrics(quality.last for quality in qualities)
    rows = []
    for name, over in over_turns.items():
        means = (over, at_the_end.get(name))
        rows.append(
            [_label(name), *(f"{format_number(m.value)} <small>n {m.count:,}</small>" if m else "–" for m in means)]
        )
    note = f"Means over the turns, and over the last memories, of {len(qualities):,} trajectories; n have the metric."
    return table("Memory quality", ("metric", "all turns", "last memory"), rows, note=note)


def settings_table(settings: dict[str, Any], other: dict[str, Any] | None) -> str:
    """Every setting of run.json; with another run's, different settings come first and are highlighted."""
    first, second = flatten(settings), flatten(other or {})
    if not other:
        return table("Settings", ("setting", "value"), [tuple(map(escape_html, leaf)) for leaf in first.items()])

    def equal(name: str) -> bool:
        return first.get(name) == second.get(name)

    rows = []
    for name in sorted(first | second, key=equal):
        label = escape_html(name) if equal(name) else f"<mark>{escape_html(name)}</mark>"
        rows.append((label, *(escape_html(one.get(name, "–")) for one in (first, second))))
    return table("Settings, differences first", ("setting", "this run", "the other"), rows)


def correct_counts(groups: Sequence[TrajectoryGroup], name: str) -> dict[int, list[tuple[int, int]]]:
    """For each value of the field `name` of `TrajectorySummary`, ascending: the correct and all scored trajectories
    with that value, of each group."""
    totals = [Counter(getattr(one, name) for one in group.summaries if one.correct is not None) for group in groups]
    correct = [Counter(getattr(one, name) for one in group.summaries if one.correct) for group in groups]
    values, pairs = sorted(set().union(*totals) - {None}), list(zip(correct, totals, strict=True))
    return {value: [(hits[value], total[value]) for hits, total in pairs] for value in values}


def _step_value(value: float) -> str:
    """A non-finite value is shown, unlike a metric that was not measured."""
    return format_number(value) if math.isfinite(value) else f'<em class="alarm">{escape_html(value)}</em>'


def _label(name: str) -> str:
    return escape_html(name.replace("_", " "))
