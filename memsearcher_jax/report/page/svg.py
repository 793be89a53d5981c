"""Line and bar charts as inline SVG. Colors are CSS classes of the page, so they follow its light and dark theme."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from memsearcher_jax.report.console import safe_text

WIDTH, HEIGHT = 420, 236
LEFT, RIGHT, TOP, BOTTOM = 48, 410, 12, 200  # the plot area; y grows downwards
MAX_MARKERS = 40  # a line of more points has no markers
POINT_LABEL_WIDTH, POINT_LABEL_HEIGHT = 60, 12
MAX_BAR_LABELS = 8  # a chart with more bars has no values above them

N_COLORS = 6  # the classes c0 to c5 of page.css

Scale = Callable[[float], float]  # from data to SVG coordinates


@dataclass(frozen=True)
class Line:
    """Points (x, y) in ascending x; a non-finite y leaves a gap. `band` is (x, low, high).

    `point_labels` are shown at the points. If not `connected`, points are dots, and the band is their error bars.
    """

    label: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    faint: bool = False
    color: int = 0  # below N_COLORS
    point_labels: Sequence[str] = ()
    connected: bool = True


@dataclass(frozen=True)
class Bar:
    value: float
    low: float  # of the interval
    high: float
    tooltip: str


def escape_html(text: object) -> str:
    """`text` for an HTML element or quoted attribute; invisible characters are shown as escapes."""
    return escape(safe_text(str(text)).plain)


def line_chart(title: str, unit: str, x_label: str, lines: Sequence[Line], *, y_min: float | None = None) -> str:
    """A figure with one chart, or with a notice if there are no finite values.

    The y axis begins at `y_min`, unless there are smaller values. Several lines that are not `faint` have a legend.
    """
    values = [y for line in lines for _, y in line.points] + [
        y for line in lines for _, *ends in line.band for y in ends
    ]
    finite = [y for y in values if math.isfinite(y)]
    if not finite:
        return _figure(title, unit, '<p class="none">No data.</p>', ())
    x_all = [x for line in lines for x, _ in line.points]
    y_ticks = ticks(min(finite if y_min is None else (y_min, *finite)), max(finite))
    # Steps and turns are integers; a short axis has a tick for each.
    x_ticks = ticks(min(x_all), max(x_all), 12 if max(x_all) - min(x_all) <= 12 else 5)
    x_ticks = [tick for tick in x_ticks if min(x_all) <= tick <= max(x_all) and tick % 1 == 0]
    to_x = _scale(min(x_all), max(x_all), LEFT + 6, RIGHT - 6)
    to_y = _scale(y_ticks[0], y_ticks[-1], BOTTOM, TOP)
    parts = [*_y_axis(y_ticks, to_y), *(_x_label(to_x(tick), _number(tick)) for tick in x_ticks)]
    for line in lines:
        parts += _band(line, to_x, to_y)
        parts += _stroke(line, to_x, to_y)
    legend = [(line.label, line.color) for line in lines if not line.faint]
    non_finite = _count_non_finite(lines)
    return _figure(title, unit, _svg(title, x_label, parts), legend, f"{non_finite} not finite" if non_finite else "")


def bar_chart(
    title: str, unit: str, x_label: str, names: Sequence[str], groups: Sequence[tuple[str, Sequence[Bar | None]]]
) -> str:
    """Fractions as bars with their intervals: for each name a bar per group; None leaves a space."""
    slot = (RIGHT - LEFT) / max(len(names), 1)
    width = min(slot * 0.7 / max(len(groups), 1), 46)
    to_y = _scale(0, 1, BOTTOM, TOP)
    parts = _y_axis([0, 0.25, 0.5, 0.75, 1], to_y)
    labelled = len(names) * len(groups) <= MAX_BAR_LABELS
    for position, name in enumerate(names):
        middle = LEFT + slot * (position + 0.5)
        parts.append(_x_label(middle, name))
        for number, (_, bars) in enumerate(groups):
            if bar := bars[position]:
                left = middle + (number - len(groups) / 2) * width
                parts += _bar(bar, left + 1, width - 2, to_y, number, labelled)
    return _figure(
        title, unit, _svg(title, x_label, parts), [(label, number) for number, (label, _) in enumerate(groups)]
    )


def share_bar(fraction: float, color: int) -> str:
    """A fraction as a small bar, for a table cell."""
    return (
        f'<svg class="share" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="track" width="100" height="8"/>'
        f'<rect class="fill c{color}" width="{100 * fraction:.2f}" height="8"/></svg>'
    )


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """At most `count` + 2 multiples of 1, 2 or 5 times a power of ten that enclose low and high."""
    largest = max(abs(low), abs(high))
    # A smaller range would give equal labels, and denormal floats lose their digits.
    if high - low <= max(1e-9 * largest, 1e-300):
        high = low + (abs(low) if largest > 1e-300 else 1.0)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    """Maps low to start and high to end; a single value to the middle."""
    if high == low:
        return lambda value: (start + end) / 2
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _y_axis(y_ticks: Iterable[float], to_y: Scale) -> list[str]:
    parts = []
    for tick in y_ticks:
        y = f"{to_y(tick):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y}" dy="0.32em" text-anchor="end">{_number(tick)}</text>')
    return parts


def _x_label(x: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{BOTTOM + 16}" text-anchor="middle">{escape_html(text)}</text>'


def _stroke(line: Line, to_x: Scale, to_y: Scale) -> list[str]:
    commands, pen_down = [], False
    for x, y in line.points:
        if math.isfinite(y):
            commands.append(f"{'L' if pen_down else 'M'}{to_x(x):.1f} {to_y(y):.1f}")
        pen_down = math.isfinite(y)
    style = f"stroke c{line.color}" + (" faint" if line.faint else "")
    parts = [f'<path class="{style}" d="{"".join(commands)}"/>'] if line.connected else []
    if len(line.points) <= MAX_MARKERS and not line.faint:
        parts += [
            f'<circle class="dot c{line.color}" cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="3">'
            f"<title>{escape_html(line.label)}: {_number(y)} at {_number(x)}</title></circle>"
            for x, y in line.points
            if math.isfinite(y)
        ]
    return parts + _point_labels(line, to_x, to_y)


def _point_labels(line: Line, to_x: Scale, to_y: Scale) -> list[str]:
    """Labels on the wider side of each point, moved above the previous label if they would overlap."""
    parts, previous, label_y = [], (-math.inf, math.inf), math.inf
    for label, (x, y) in zip(line.point_labels, line.points, strict=False):
        if not math.isfinite(y):
            continue
        left, top = to_x(x), to_y(y)
        overlaps = left - previous[0] < POINT_LABEL_WIDTH and abs(top - previous[1]) < POINT_LABEL_HEIGHT
        previous, label_y = (left, top), label_y - POINT_LABEL_HEIGHT if overlaps else top - 5
        side, anchor = (7, "start") if left < (LEFT + RIGHT) / 2 else (-7, "end")
        at = f'x="{left + side:.1f}" y="{label_y:.1f}" text-anchor="{anchor}"'
        parts.append(f'<text class="value" {at}>{escape_html(label)}</text>')
    return parts


def _band(line: Line, to_x: Scale, to_y: Scale) -> list[str]:
    if not line.connected:
        return [_whisker(to_x(x), to_y(low), to_y(high)) for x, low, high in line.band if math.isfinite(high - low)]
    if len(line.band) < 2:
        return []
    upper = [f"{to_x(x):.1f} {to_y(high):.1f}" for x, _, high in line.band]
    lower = [f"{to_x(x):.1f} {to_y(low):.1f}" for x, low, _ in reversed(line.band)]
    return [f'<path class="band c{line.color}" d="M{"L".join([*upper, *lower])}Z"/>']


def _bar(bar: Bar, left: float, width: float, to_y: Scale, color: int, labelled: bool) -> list[str]:
    middle, top = left + width / 2, to_y(bar.value)
    parts = [
        f'<rect class="fill c{color}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{BOTTOM - top:.1f}">'
        f"<title>{escape_html(bar.tooltip)}</title></rect>",
        _whisker(middle, to_y(bar.low), to_y(bar.high)),
    ]
    if labelled:
        y = min(to_y(bar.high) - 5, BOTTOM - 8)
        parts.append(f'<text class="value" x="{middle:.1f}" y="{y:.1f}" text-anchor="middle">{bar.value:.2f}</text>')
    return parts


def _whisker(x: float, low: float, high: float) -> str:
    return f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'


def _svg(title: str, x_label: str, parts: Sequence[str]) -> str:
    opening = f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape_html(title)}">'
    label = f'<text class="unit" x="{RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape_html(x_label)}</text>'
    return f"{opening}{''.join(parts)}{label}</svg>"


def _figure(title: str, unit: str, body: str, legend: Sequence[tuple[str, int]], note: str = "") -> str:
    items = "".join(f'<li><span class="key c{color}"></span>{escape_html(label)}</li>' for label, color in legend)
    return (
        f"<figure><figcaption><b>{escape_html(title)}</b> <span>{escape_html(unit)}</span>"
        + (f' <em class="alarm">{escape_html(note)}</em>' if note else "")
        + f"</figcaption>{body}"
        + (f'<ul class="legend">{items}</ul>' if len(legend) > 1 else "")
        + "</figure>"
    )


def _count_non_finite(lines: Sequence[Line]) -> int:
    """Number of non-finite points; a smoothed line is not counted, because its faint line has the same ones."""
    counted = [line for line in lines if line.faint] or lines
    return sum(not math.isfinite(y) for line in counted for _, y in line.points)


def _number(value: float) -> str:
    return f"{value:,.6g}"
