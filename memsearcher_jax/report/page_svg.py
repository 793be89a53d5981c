"""Line and bar charts as inline SVG, whose colours are the page's CSS classes: they follow its light and dark theme."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from memsearcher_jax.report.console import plain

WIDTH, HEIGHT = 420, 236
LEFT, RIGHT, TOP, BOTTOM = 48, 410, 12, 200  # the plot's frame; y grows downwards
MOST_DOTS = 40  # points of a line that are marked and can be pointed at
NAME_ROOM, NAME_HEIGHT = 60, 12  # of the name beside a point
MOST_LABELS = 8  # bars that have their value above them


@dataclass(frozen=True)
class Line:
    """Points (x, y) from left to right; a y that is not finite leaves a gap. `band` holds (x, low, high).

    `names`, if there are any, are one for each point and stand beside it. Points that are not `joined` are dots, each
    with its part of the band as a whisker.
    """

    label: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    faint: bool = False
    color: int = 0
    names: Sequence[str] = ()
    joined: bool = True


@dataclass(frozen=True)
class Bar:
    value: float
    low: float  # ends of its interval
    high: float
    hint: str  # what pointing at it says


def markup(text: object) -> str:
    """`text` for HTML, in an element or a quoted attribute; what a reader could not see is spelt out."""
    return escape(plain(str(text)).plain)


def line_chart(title: str, unit: str, x_label: str, lines: Sequence[Line], *, floor: float | None = None) -> str:
    """A figure with one chart, or a figure that says there is no number to show.

    `floor` is the bottom of the y axis, where 0 means something. Lines that are not `faint` stand in the legend if
    there are several.
    """
    seen = [y for line in lines for _, y in line.points] + [y for line in lines for _, *ends in line.band for y in ends]
    finite = [y for y in seen if math.isfinite(y)]
    if not finite:
        return _figure(title, unit, '<p class="none">No number to show.</p>', ())
    x_all = [x for line in lines for x, _ in line.points]
    y_ticks = ticks(min(finite) if floor is None else floor, max(finite))
    # Steps and turns are whole; a chart of a few names them all.
    x_ticks = ticks(min(x_all), max(x_all), 12 if max(x_all) - min(x_all) <= 12 else 5)
    x_ticks = [tick for tick in x_ticks if min(x_all) <= tick <= max(x_all) and tick % 1 == 0]
    across = _scale(min(x_all), max(x_all), LEFT + 6, RIGHT - 6)
    up = _scale(y_ticks[0], y_ticks[-1], BOTTOM, TOP)
    parts = [*_y_axis(y_ticks, up), *(_x_label(across(tick), _number(tick)) for tick in x_ticks)]
    parts.append(f'<text class="unit" x="{RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{markup(x_label)}</text>')
    for line in lines:
        parts += _band(line, across, up)
        parts += _stroke(line, across, up)
    legend = [(line.label, line.color) for line in lines if not line.faint]
    lost = _lost(lines)
    return _figure(title, unit, _svg(title, parts), legend, f"{lost} not finite" if lost else "")


def bar_chart(
    title: str, unit: str, x_label: str, names: Sequence[str], groups: Sequence[tuple[str, Sequence[Bar | None]]]
) -> str:
    """Shares from 0 to 1 as bars with their intervals: for each name one of every group; None leaves a place empty."""
    room = (RIGHT - LEFT) / max(len(names), 1)
    width = min(room * 0.7 / max(len(groups), 1), 46)
    up = _scale(0, 1, BOTTOM, TOP)
    parts = _y_axis([0, 0.25, 0.5, 0.75, 1], up)
    labelled = len(names) * len(groups) <= MOST_LABELS
    for place, name in enumerate(names):
        middle = LEFT + room * (place + 0.5)
        parts.append(_x_label(middle, name))
        for number, (_, bars) in enumerate(groups):
            if bar := bars[place]:
                left = middle + (number - len(groups) / 2) * width
                parts += _bar(bar, left + 1, width - 2, up, number, labelled)
    parts.append(f'<text class="unit" x="{RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{markup(x_label)}</text>')
    return _figure(title, unit, _svg(title, parts), [(label, number) for number, (label, _) in enumerate(groups)])


def share_bar(share: float, color: int = 0) -> str:
    """A share from 0 to 1 as a small bar, for a cell of a table."""
    return (
        f'<svg class="share" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="track" width="100" height="8"/>'
        f'<rect class="fill c{color}" width="{100 * share:.2f}" height="8"/></svg>'
    )


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers, at most `most` + 2, evenly spaced by 1, 2 or 5 times a power of ten, that enclose low and high."""
    largest = max(abs(low), abs(high))
    # So little apart, all labels would read the same; and a float has few digits left below 1e-300.
    if high - low <= max(1e-9 * largest, 1e-300):
        high = low + (abs(low) if largest > 1e-300 else 1.0)
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _scale(low: float, high: float, start: float, end: float):
    """Maps low to start and high to end; one value alone goes to the middle."""
    if high == low:
        return lambda value: (start + end) / 2
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _y_axis(y_ticks: Iterable[float], up) -> list[str]:
    parts = []
    for tick in y_ticks:
        y = f"{up(tick):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y}" dy="0.32em" text-anchor="end">{_number(tick)}</text>')
    return parts


def _x_label(x: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{BOTTOM + 16}" text-anchor="middle">{markup(text)}</text>'


def _stroke(line: Line, across, up) -> list[str]:
    commands, pen_down = [], False
    for x, y in line.points:
        if math.isfinite(y):
            commands.append(f"{'L' if pen_down else 'M'}{across(x):.1f} {up(y):.1f}")
        pen_down = math.isfinite(y)
    style = f"stroke c{line.color}" + (" faint" if line.faint else "")
    parts = [f'<path class="{style}" d="{"".join(commands)}"/>'] if line.joined else []
    if len(line.points) <= MOST_DOTS and not line.faint:
        parts += [
            f'<circle class="dot c{line.color}" cx="{across(x):.1f}" cy="{up(y):.1f}" r="3">'
            f"<title>{markup(line.label)}: {_number(y)} at {_number(x)}</title></circle>"
            for x, y in line.points
            if math.isfinite(y)
        ]
    return parts + _names(line, across, up)


def _names(line: Line, across, up) -> list[str]:
    """Each on the side where there is more room, and above the one before where the two would meet."""
    parts, before, place = [], (-math.inf, math.inf), math.inf
    for name, (x, y) in zip(line.names, line.points, strict=False):
        if not math.isfinite(y):
            continue
        left, top = across(x), up(y)
        meet = left - before[0] < NAME_ROOM and abs(top - before[1]) < NAME_HEIGHT
        before, place = (left, top), place - NAME_HEIGHT if meet else top - 5
        side, anchor = (7, "start") if left < (LEFT + RIGHT) / 2 else (-7, "end")
        at = f'x="{left + side:.1f}" y="{place:.1f}" text-anchor="{anchor}"'
        parts.append(f'<text class="value" {at}>{markup(name)}</text>')
    return parts


def _band(line: Line, across, up) -> list[str]:
    if not line.joined:
        return [_whisker(across(x), up(low), up(high)) for x, low, high in line.band]
    if len(line.band) < 2:
        return []
    upper = [f"{across(x):.1f} {up(high):.1f}" for x, _, high in line.band]
    lower = [f"{across(x):.1f} {up(low):.1f}" for x, low, _ in reversed(line.band)]
    return [f'<path class="band c{line.color}" d="M{"L".join([*upper, *lower])}Z"/>']


def _bar(bar: Bar, left: float, width: float, up, color: int, labelled: bool) -> list[str]:
    middle, top = left + width / 2, up(bar.value)
    parts = [
        f'<rect class="fill c{color}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{BOTTOM - top:.1f}">'
        f"<title>{markup(bar.hint)}</title></rect>",
        _whisker(middle, up(bar.low), up(bar.high)),
    ]
    if labelled:
        y = min(up(bar.high) - 5, BOTTOM - 8)
        parts.append(f'<text class="value" x="{middle:.1f}" y="{y:.1f}" text-anchor="middle">{bar.value:.2f}</text>')
    return parts


def _whisker(x: float, low: float, high: float) -> str:
    return f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'


def _svg(title: str, parts: Sequence[str]) -> str:
    drawing = "".join(parts)
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{markup(title)}">{drawing}</svg>'


def _figure(title: str, unit: str, body: str, legend: Sequence[tuple[str, int]], note: str = "") -> str:
    keys = "".join(f'<li><span class="key c{color}"></span>{markup(label)}</li>' for label, color in legend)
    return (
        f"<figure><figcaption><b>{markup(title)}</b> <span>{markup(unit)}</span>"
        + (f' <em class="alarm">{markup(note)}</em>' if note else "")
        + f"</figcaption>{body}"
        + (f'<ul class="legend">{keys}</ul>' if len(legend) > 1 else "")
        + "</figure>"
    )


def _lost(lines: Sequence[Line]) -> int:
    """Points without a finite value; a smoothed line repeats those of the faint one below it and is not counted."""
    counted = [line for line in lines if line.faint] or lines
    return sum(not math.isfinite(y) for line in counted for _, y in line.points)


def _number(value: float) -> str:
    return f"{value:,.6g}"
