"""The report page: one HTML file for a run, complete in itself, that a browser opens without a network.

Numbers, tables and plots are HTML and SVG made here; the trajectories are JSON inside the page that web/*.js shows. The
page's own policy lets a browser run that one script and load nothing, so that even text which slipped through
escaping could do nothing.
"""

from __future__ import annotations

import base64
import hashlib
import math
import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np

from memsearcher_jax.report import page_tables as tables
from memsearcher_jax.report.files import replacing
from memsearcher_jax.report.memory_quality import Rules
from memsearcher_jax.report.page_facts import Facts, Group, Run, groups_of, labels_of, mean, read_run, wilson_interval
from memsearcher_jax.report.page_records import Browsed, data_elements
from memsearcher_jax.report.page_svg import Bar, Line, bar_chart, line_chart, markup
from memsearcher_jax.report.plots import Panel, family_panels, label_of, panels_of, running_mean

MOST = 5_000  # trajectories that a page holds unless told otherwise
SCRIPTS = ("diff.js", "detail.js", "page.js")  # in this order they are one script
BAND = (10, 90)  # percentiles of the tokens that the plot shades


def write_page(
    folder: str | Path, out: str | Path, rules: Rules, *, compare: str | Path | None = None, most: int = MOST
) -> dict[str, int]:
    """Writes the page of the run in `folder`; returns how many trajectories were read and how many it holds.

    `rules` are those by which memories are measured. `compare` names another run, whose numbers and plots stand beside.
    `most` bounds the trajectories of the browser and, for a training run, those that are read (see `read_run`).

    Raises:
        FileNotFoundError, ValueError: a folder is missing, is no run, or is damaged; nothing is written then.
    """
    if most < 1:
        raise ValueError(f"a page of {most} trajectories would be empty: at least 1 is needed")
    browsed = Browsed(rules)
    run = read_run(folder, most=most, browse=browsed.add)
    other = read_run(compare, most=most) if compare is not None else None
    page = render(run, other, browsed)
    with replacing(Path(out)) as file:
        file.write(page.encode("utf-8"))
    return {"read": len(run.facts), "shown": len(browsed.index)}


def render(run: Run, other: Run | None, browsed: Browsed) -> str:
    """The whole page."""
    if other:
        label, other_label = labels_of(run, other)
        run, other = replace(run, name=label), replace(other, name=other_label)
    own = groups_of(run, run.name if other else "")
    # Of the other run, where it is a training run, the end alone stands beside.
    beside = groups_of(other, other.name)[-1:] if other else []
    groups = own + beside
    style, script = web_file("page.css"), "\n".join(map(web_file, SCRIPTS))
    return string.Template(web_file("page.html")).substitute(
        policy=policy(style, script),
        style=style,
        script=script,
        title=markup(f"{run.name}: {run.kind}"),
        heading=markup(run.name),
        about=markup(_about(run, other)),
        tiles=_tiles(own[-1:], beside),
        plots="\n".join(_plots(run, other, groups)),
        tables="\n".join(filter(None, [*_tables(run, other, groups), tables.memory_table(browsed.qualities)])),
        settings=tables.settings_table(run.settings, other.settings if other else None),
        data=data_elements(browsed),
    )


def _about(run: Run, other: Run | None) -> str:
    parts = [run.kind.capitalize()]
    if checkpoint := run.results.get("checkpoint"):
        step = run.results.get("step")
        parts.append(f"of {Path(str(checkpoint)).name}" + (f", step {step}" if step is not None else ""))
    if run.steps:
        parts.append(f"with {len(run.steps):,} steps")
    if other:
        parts.append(f"beside {other.name}")
    return " ".join(parts) + f". {len(run.facts):,} trajectories. {run.note}".rstrip()


def _tiles(own: Sequence[Group], beside: Sequence[Group]) -> str:
    """The numbers one looks for first, of one group at most, and those of another below them."""
    if not own:
        return ""
    (group,), others = own, [tables.summary(one.facts) for one in beside]
    tiles = []
    for name, value in tables.summary(group.facts).items():
        below = "".join(f"<small>{tables.number(one[name])} in the other</small>" for one in others if name in one)
        tiles.append(f"<div><dt>{markup(name)}</dt><dd>{tables.number(value)}{below}</dd></div>")
    told = f"Means over {len(group.facts):,} trajectories: {group.label}" + "".join(f"; {one.label}" for one in beside)
    return f'<dl class="tiles">{"".join(tiles)}</dl><p class="note">{markup(told)}.</p>'


def _tables(run: Run, other: Run | None, groups: Sequence[Group]) -> list[str]:
    parts = [tables.results_table(run, other)] if run.results.get("metrics") else []
    if groups:
        parts += [
            tables.stops_table(groups),
            tables.accuracy_table("Accuracy by hops", "hops", groups, _hops),
            tables.accuracy_table("Accuracy by turns", "turns", groups, _turns),
            _turn_tokens_table(groups),
            tables.datasets_table(groups),
        ]
    if run.steps:
        parts.append(tables.steps_table(run.steps))
    return parts


def _plots(run: Run, other: Run | None, groups: Sequence[Group]) -> list[str]:
    runs = [(run.name, run.steps), *([(other.name, other.steps)] if other else [])]
    parts = [_curve(panel, runs) for panel in panels_of(run.steps)]
    parts += [_curve(panel, runs[:1]) for panel in family_panels(run.steps)]
    if groups:
        parts.append(_turn_tokens_plot(groups))
        parts.append(_accuracy_plot("Accuracy by hops", "hops", groups, _hops))
        parts.append(_accuracy_plot("Accuracy by turns", "turns", groups, _turns))
    return [part for part in parts if part]


def _curve(panel: Panel, runs: Sequence[tuple[str, list]]) -> str:
    """Thin lines are the steps, thick ones their mean over a window that grows with the run, as in curves.png."""
    lines, color = [], 0
    for label, steps in runs:
        for name in panel.names:
            value_T = np.array([metrics.get(name, math.nan) for metrics in steps if name in metrics], dtype=float)
            step_T = [metrics["step"] for metrics in steps if name in metrics]
            window = max(1, len(value_T) // 20)
            title = label if len(runs) > 1 else label_of(name)
            if window > 1:
                lines.append(Line(title, list(zip(step_T, value_T, strict=True)), faint=True, color=color))
                value_T = running_mean(np.where(np.isfinite(value_T), value_T, np.nan), window)
            lines.append(Line(title, list(zip(step_T, value_T, strict=True)), color=color))
            color += 1
    return line_chart(panel.title, panel.unit, "step", [line for line in lines if line.points], floor=panel.floor)


def _turn_tokens_plot(groups: Sequence[Group]) -> str:
    lines = []
    for color, group in enumerate(groups):
        tokens = _turn_tokens(group)
        lines.append(
            Line(
                group.label,
                [(turn, mean(values)) for turn, values in tokens.items()],
                [(turn, *np.percentile(values, BAND)) for turn, values in tokens.items()],
                color=color,
            )
        )
    unit = f"tokens in context when the turn ends: mean, {BAND[0]}th to {BAND[1]}th percentile"
    return line_chart("Tokens by turn", unit, "turn", lines, floor=0)


def _turn_tokens_table(groups: Sequence[Group]) -> str:
    tokens = [_turn_tokens(group) for group in groups]
    rows = []
    for turn in sorted(set().union(*tokens)):
        cells = [
            f"{mean(values[turn]):,.0f} <small>n {len(values[turn]):,}</small>" if turn in values else "–"
            for values in tokens
        ]
        rows.append([str(turn), *cells])
    note = "Mean tokens in context when the turn ends, over the n trajectories that reached it."
    return tables.table("Tokens by turn", ("turn", *(group.label for group in groups)), rows, note=note)


def _turn_tokens(group: Group) -> dict[int, list[int]]:
    """For each turn, counted from 1, the tokens of every trajectory that reached it."""
    tokens: dict[int, list[int]] = {}
    for one in group.facts:
        for turn, count in enumerate(one.tokens_of_turns, 1):
            tokens.setdefault(turn, []).append(count)
    return dict(sorted(tokens.items()))


def _accuracy_plot(title: str, x_label: str, groups: Sequence[Group], key: Callable[[Facts], int | None]) -> str:
    keys = tables.keys_of(groups, key)
    if not keys:
        return ""
    series = [(group.label, [_accuracy_bar(group, key, value, x_label) for value in keys]) for group in groups]
    return bar_chart(title, "exact match, 95 % interval", x_label, list(map(str, keys)), series)


def _accuracy_bar(group: Group, key: Callable[[Facts], int | None], value: int, what: str) -> Bar | None:
    right, total = tables.right_of(group.facts, key, value)
    if not total:
        return None
    low, high = wilson_interval(right, total)
    hint = f"{group.label}, {what} {value}: {right:,} of {total:,} right, {low:.3f} to {high:.3f}"
    return Bar(right / total, low, high, hint)


def _hops(facts: Facts) -> int | None:
    return facts.hops


def _turns(facts: Facts) -> int:
    return facts.turns


def web_file(name: str) -> str:
    """The text of a file in report/web."""
    return (files("memsearcher_jax.report") / "web" / name).read_text(encoding="utf-8")


def policy(style: str, *scripts: str) -> str:
    """A Content-Security-Policy under which nothing is loaded and only this style and these scripts count."""
    style_hash, *script_hashes = (
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in (style, *scripts)
    )
    allowed = " ".join(script_hashes) or "'none'"
    return f"default-src 'none'; style-src {style_hash}; script-src {allowed}; base-uri 'none'; form-action 'none'"
