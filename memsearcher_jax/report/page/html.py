"""The report page of a run: one self-contained HTML file.

Metrics, tables and plots are HTML and SVG; the trajectories are JSON inside the page, which web/*.js displays. The
page's Content-Security-Policy allows that one script and nothing else, so even text that was not escaped correctly
could not run or load anything.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import string
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np

from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.metrics import Metrics
from memsearcher_jax.report.console import format_number
from memsearcher_jax.report.memory_quality import MemoryRules
from memsearcher_jax.report.page import tables
from memsearcher_jax.report.page.records import TrajectoryRecords, data_elements
from memsearcher_jax.report.page.run_data import RunData, TrajectoryGroup, distinct_labels, groups_of, read_run
from memsearcher_jax.report.page.svg import N_COLORS, Bar, Line, bar_chart, escape_html, line_chart
from memsearcher_jax.report.plots import Panel, family_panels, measured_panels, running_mean, series, series_label
from memsearcher_jax.report.statistics import mean, wilson_interval

MAX_TRAJECTORIES = 5_000  # of a page, by default
SCRIPTS = ("diff.js", "detail.js", "page.js")  # concatenated in this order
BAND_PERCENTILES = (10, 90)  # of the tokens by turn
BREAKDOWNS = ("hops", "turns")  # of the accuracy: fields of `TrajectorySummary`


def write_page(
    folder: Path,
    out: Path,
    rules: MemoryRules,
    *,
    compare: Path | None = None,
    max_trajectories: int = MAX_TRAJECTORIES,
    reload_seconds: int = 0,
) -> dict[str, int]:
    """Write the page of the run in `folder`; return how many trajectories were read and how many the page contains.

    `compare` is another run, shown in the same tables and plots. `max_trajectories` limits the trajectories in the page
    and, for a training run, those that are read (see `read_run`). `reload_seconds`: after which the page of a running
    job reloads itself.

    Raises:
        FileNotFoundError, ValueError: a folder is missing, is not a run, or is damaged; nothing is written.
    """
    records = TrajectoryRecords(rules)
    run = read_run(folder, max_trajectories=max_trajectories, on_trajectory=records.add)
    other = read_run(compare, max_trajectories=max_trajectories) if compare is not None else None
    atomic_write(out, render(run, other, records, reload_seconds).encode("utf-8"))
    return {"read": len(run.summaries), "shown": len(records.index)}


def render(run: RunData, other: RunData | None, records: TrajectoryRecords, reload_seconds: int) -> str:
    """The HTML of the page."""
    if other:
        label, other_label = distinct_labels(run, other)
        run, other = replace(run, name=label), replace(other, name=other_label)
    own_groups = groups_of(run, run.name if other else "")
    # Of another training run, only its last steps are compared.
    other_groups = groups_of(other, other.name)[-1:] if other else []
    groups = own_groups + other_groups
    style, script = web_file("page.css"), "\n".join(map(web_file, SCRIPTS))
    return string.Template(web_file("page.html")).substitute(
        reload=f'<meta http-equiv="refresh" content="{reload_seconds}">' if reload_seconds else "",
        policy=content_security_policy(style, script),
        style=style,
        script=script,
        title=escape_html(f"{run.name}: {run.kind}"),
        heading=escape_html(run.name),
        about=escape_html(_about(run, other)),
        tiles=_tiles(own_groups[-1], other_groups[0] if other_groups else None) if own_groups else "",
        plots="\n".join(_plots(run, other, groups)),
        tables="\n".join(filter(None, [*_tables(run, other, groups), tables.memory_table(records.qualities)])),
        settings=tables.settings_table(run.settings, other.settings if other else None),
        data=data_elements(records),
    )


def _about(run: RunData, other: RunData | None) -> str:
    parts = [run.kind.capitalize()]
    if checkpoint := run.results.get("checkpoint"):
        step = run.results.get("step")
        parts.append(f"of {Path(str(checkpoint)).name}" + (f", step {step}" if step is not None else ""))
    if run.steps:
        parts.append(f"with {len(run.steps):,} steps")
    if other:
        parts.append(f"compared with {other.name}")
    return " ".join(parts) + f". {len(run.summaries):,} trajectories. {run.note}".rstrip()


def _tiles(group: TrajectoryGroup, other: TrajectoryGroup | None) -> str:
    """The main metrics of a group, with those of the other group below."""
    others = tables.summary_metrics(other.summaries) if other else {}
    tiles = []
    for name, value in tables.summary_metrics(group.summaries).items():
        below = f"<small>{format_number(others[name])} in the other</small>" if name in others else ""
        tiles.append(f"<div><dt>{escape_html(name)}</dt><dd>{format_number(value)}{below}</dd></div>")
    note = f"Means over {len(group.summaries):,} trajectories: {group.label}{f'; {other.label}' if other else ''}."
    return f'<dl class="tiles">{"".join(tiles)}</dl><p class="note">{escape_html(note)}</p>'


def _tables(run: RunData, other: RunData | None, groups: Sequence[TrajectoryGroup]) -> list[str]:
    parts = [tables.results_table(run, other)] if run.results.get("metrics") else []
    if groups:
        parts.append(tables.stops_table(groups))
        parts += [tables.accuracy_table(groups, name) for name in BREAKDOWNS]
        parts += [_turn_tokens_table(groups), tables.datasets_table(groups)]
    if run.steps:
        parts.append(tables.steps_tables(run.steps))
    return parts


def _plots(run: RunData, other: RunData | None, groups: Sequence[TrajectoryGroup]) -> list[str]:
    runs = [(run.name, run.steps), *([(other.name, other.steps)] if other else [])]
    parts = [_curve(panel, runs) for panel in measured_panels(run.steps)]
    parts += [_curve(panel, runs[:1]) for panel in family_panels(run.steps)]
    if groups:
        parts.append(_turn_tokens_plot(groups))
        parts += [_accuracy_plot(groups, name) for name in BREAKDOWNS]
    return [part for part in parts if part]


def _curve(panel: Panel, runs: Sequence[tuple[str, Sequence[Metrics]]]) -> str:
    """Thin lines are the steps, thick lines their running mean over a window that grows with the run."""
    lines, colors = [], itertools.cycle(range(N_COLORS))
    for label, steps in runs:
        for name in panel.metrics:
            step_T, value_T, window = series(steps, name)
            title, color = label if len(runs) > 1 else series_label(name), next(colors)
            if window > 1:
                lines.append(Line(title, list(zip(step_T, value_T, strict=True)), faint=True, color=color))
                value_T = running_mean(value_T, window)
            lines.append(Line(title, list(zip(step_T, value_T, strict=True)), color=color))
    return line_chart(panel.title, panel.unit, "step", [line for line in lines if line.points], y_min=panel.y_min)


def _turn_tokens_plot(groups: Sequence[TrajectoryGroup]) -> str:
    lines = []
    for color, group in enumerate(groups):
        tokens = _turn_tokens(group)
        points = [(turn, mean(values)) for turn, values in tokens.items()]
        band = [(turn, *np.percentile(values, BAND_PERCENTILES)) for turn, values in tokens.items()]
        lines.append(Line(group.label, points, band, color=color))
    low, high = BAND_PERCENTILES
    unit = f"in context at the end of the turn: mean, {low}th to {high}th percentile"
    return line_chart("Tokens by turn", unit, "turn", lines, y_min=0)


def _turn_tokens_table(groups: Sequence[TrajectoryGroup]) -> str:
    tokens = [_turn_tokens(group) for group in groups]
    rows = []
    for turn in sorted(set().union(*tokens)):
        cells = [
            f"{mean(values[turn]):,.0f} <small>n {len(values[turn]):,}</small>" if turn in values else "–"
            for values in tokens
        ]
        rows.append([str(turn), *cells])
    note = "Mean tokens in context at the end of the turn, over the n trajectories that reached it."
    return tables.table("Tokens by turn", ("turn", *(group.label for group in groups)), rows, note=note)


def _turn_tokens(group: TrajectoryGroup) -> dict[int, list[int]]:
    """For each turn, counted from 1, the tokens of every trajectory that reached it."""
    tokens: dict[int, list[int]] = {}
    for summary in group.summaries:
        for turn, count in enumerate(summary.context_lengths, 1):
            tokens.setdefault(turn, []).append(count)
    return tokens


def _accuracy_plot(groups: Sequence[TrajectoryGroup], name: str) -> str:
    counts = tables.correct_counts(groups, name)
    if not counts:
        return ""

    def bar(label: str, value: int, correct: int, total: int) -> Bar | None:
        low, high = wilson_interval(correct, total)
        tooltip = f"{label}, {name} {value}: {correct:,} of {total:,} correct, {low:.3f} to {high:.3f}"
        return Bar(correct / total, low, high, tooltip) if total else None

    series = [
        (group.label, [bar(group.label, value, *columns[number]) for value, columns in counts.items()])
        for number, group in enumerate(groups)
    ]
    return bar_chart(f"Accuracy by {name}", "exact match, 95% interval", name, list(map(str, counts)), series)


def web_file(name: str) -> str:
    """The text of a file in report/page/web."""
    return (files("memsearcher_jax.report.page") / "web" / name).read_text(encoding="utf-8")


def content_security_policy(style: str, *scripts: str) -> str:
    """A policy that allows this style, these scripts and no network."""
    style_hash, *script_hashes = (
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in (style, *scripts)
    )
    allowed = " ".join(script_hashes) or "'none'"
    return f"default-src 'none'; style-src {style_hash}; script-src {allowed}; base-uri 'none'; form-action 'none'"
