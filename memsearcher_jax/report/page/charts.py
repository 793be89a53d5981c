"""Plots of the report page: matplotlib draws them as SVG, which becomes a part of the HTML.

The page's policy forbids style attributes, so each becomes presentation attributes. Colors become the variables of
page.css, so that they follow its light and dark theme, and text has the page's font.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from memsearcher_jax.logs.metrics import Metrics
from memsearcher_jax.report.console import safe_text
from memsearcher_jax.report.page.run_data import TrajectoryGroup
from memsearcher_jax.report.page.tables import escape_html
from memsearcher_jax.report.plots import COLORS, GREY, GRID, INK, Legend, Panel, draw_curves, draw_dots, fit, style_axes
from memsearcher_jax.report.statistics import mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (4.2, 2.36)  # inches
BAND_PERCENTILES = (10, 90)  # of the tokens by turn
VARIABLES = {color.lower(): f"c{number}" for number, color in enumerate(COLORS)}
VARIABLES |= {INK.lower(): "ink", GREY.lower(): "faint", GRID.lower(): "line"}
Draw = Callable[["Axes"], tuple[Legend, int]]
"""Draws on axes; returns the legend and the number of values that are not finite."""


def chart(title: str, unit: str, draw: Draw) -> str:
    """A figure with one plot, or with a notice if there is nothing to draw."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(SIZE)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    legend, non_finite = draw(axes)
    fit(axes, figure, (0.0, 0.0), (SIZE[0] - 0.08, SIZE[1] - 0.05))
    content = io.StringIO()
    # The text stays text; the salt makes the ids, and so the page, the same each time.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "memsearcher_jax"}):
        empty = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(content, format="svg", transparent=True, metadata=empty)
    drawn = np.isfinite(axes.dataLim.get_points()).all()
    body = inline_svg(content.getvalue(), title) if drawn else '<p class="none">No data.</p>'
    note = f' <em class="alarm">{non_finite} not finite</em>' if non_finite else ""
    keys = [f'<span class="key {VARIABLES[color.lower()]}"></span>{escape_html(label)}' for label, color in legend]
    return (
        f"<figure><figcaption><b>{escape_html(title)}</b> <span>{escape_html(unit)}</span>{note}</figcaption>{body}"
        + (f'<ul class="legend"><li>{"</li><li>".join(keys)}</li></ul>' if len(keys) > 1 and drawn else "")
        + "</figure>"
    )


def inline_svg(svg: str, title: str) -> str:
    """The SVG file of matplotlib as an element that the page's policy and themes allow for."""
    svg = " ".join(svg[svg.index("<svg") :].split())
    view_box = re.search(r'viewBox="[^"]*"', svg)
    body = re.sub(r"<defs> <style.*?</style> </defs>", "", svg[svg.index(">") + 1 :])
    body = re.sub(r'<g id="tip: ([^"]*)">', lambda tip: f"<g><title>{safe_text(tip[1]).plain}</title>", body)
    body = re.sub(r' style="([^"]*)"', lambda match: _attributes(match[1]), re.sub(r'<g id="[^"]*"', "<g", body))
    return f'<svg class="chart" {view_box and view_box[0]} role="img" aria-label="{escape_html(title)}">{body}'


def _attributes(style: str) -> str:
    pairs = (declaration.split(": ", 1) for declaration in style.rstrip("; ").split("; "))
    return "".join(
        f' {name}="var(--{VARIABLES[value]})"' if value in VARIABLES else f' {name}="{value}"'
        for name, value in pairs
        if name != "font-family"
    )


def curve(panel: Panel, runs: Sequence[tuple[str, Sequence[Metrics]]]) -> str:
    """The panel of one or more runs, which are (label, steps)."""
    return chart(panel.title, panel.unit, lambda axes: draw_curves(axes, panel, runs))


def turn_tokens(groups: Sequence[TrajectoryGroup]) -> str:
    """The mean tokens in context at the end of each turn, with percentiles as bands."""
    low, high = BAND_PERCENTILES

    def draw(axes: Axes) -> tuple[Legend, int]:
        for group, color in zip(groups, COLORS, strict=False):
            lengths = [summary.context_lengths for summary in group.summaries]
            turns = range(max(map(len, lengths), default=0))
            tokens = [[turn_lengths[turn] for turn_lengths in lengths if turn < len(turn_lengths)] for turn in turns]
            turn_N = np.array(turns) + 1.0
            mean_N = np.array([mean(values) for values in tokens])
            axes.plot(turn_N, mean_N, color=color, linewidth=1.6)
            draw_dots(axes, turn_N, mean_N, color, [f"{group.label}, n {len(values):,}" for values in tokens])
            if len(tokens) > 1:
                ends = np.array([np.percentile(values, BAND_PERCENTILES) for values in tokens])
                axes.fill_between(turn_N, *ends.T, color=color, alpha=0.15, linewidth=0)
        style_axes(axes, "turn", 0.0)
        return [(group.label, color) for group, color in zip(groups, COLORS, strict=False)], 0

    return chart("Tokens by turn", f"in context at the end of the turn: mean, {low}th to {high}th percentile", draw)
