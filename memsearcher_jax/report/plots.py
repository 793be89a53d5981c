"""Training curves: one small panel per measured quantity, as one PNG and, panel by panel, on the report page."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.metric_names import PHASE_PREFIX, STOP_PREFIX, MetricName
from memsearcher_jax.logs.metrics import Metrics, read_metrics
from memsearcher_jax.report.labels import label
from memsearcher_jax.report.statistics import mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES_FILE = "curves.png"  # the last file of a training run

# The palette of Okabe and Ito, distinguishable with any colour vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK = "#333333"
GREY = "#777777"
GRID = "#E3E3E3"
ALARM = "#B00020"
COLUMNS = 4
CELL = (3.8, 2.8)  # inches of a panel with its title and legend
LETTER = 0.07  # inches of a letter of 8.5 points
MAX_MARKERS = 40  # a line of more points has no markers

Legend = list[tuple[str, str]]  # label and color of each line


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    metrics: tuple[str, ...]  # a line each; in `PANELS` regular expressions of their names
    y_min: float | None = 0.0  # where the y axis begins, unless there are smaller values


PANELS = (
    Panel("Reward", "mean over trajectories", (MetricName.REWARD,)),
    Panel("Exact match", "fraction of trajectories", (MetricName.EXACT_MATCH,)),
    Panel("Accuracy", "fraction of a stream's questions", (MetricName.ACCURACY,)),
    Panel("Turns", "mean over trajectories", (MetricName.TURNS,)),
    Panel("Tokens per turn", "mean over turns", (MetricName.TOKENS_PER_TURN,)),
    Panel("Memory", "tokens, mean over trajectories", (MetricName.MEMORY_TOKENS,)),
    Panel("Entropy", "nats per token", (MetricName.ENTROPY,)),
    Panel("KL from the initial weights", "nats per token", (MetricName.KL,), None),
    Panel("KL of a step", "old − new, nats per token", (MetricName.APPROX_KL,), None),
    Panel("Likelihood of right answers", "mean log-probability", (MetricName.CORRECT_LOGPROB,), None),
    Panel("Sampler vs trainer", "mean |Δ log-probability|", (MetricName.LOGPROB_DIFF_MEAN,)),
    Panel("Idle slots", "fraction of the sampler's slots", (MetricName.IDLE_SLOT_SHARE,)),
    Panel("Host wait", "seconds of a rollout without a call", (MetricName.HOST_WAIT,)),
    Panel("Search latency", "seconds, mean and 95th percentile", (rf"{MetricName.SEARCH_LATENCY}(_p95)?",)),
    Panel("Device memory", "GB in use, and peak", (MetricName.DEVICE_GB, MetricName.DEVICE_PEAK_GB)),
    Panel("Host memory", "GB, peak of a step", (MetricName.HOST_PEAK_GB,)),
    Panel("Exact match by hops", "fraction of trajectories", (rf"{MetricName.EXACT_MATCH}/\d+_hops",)),
    Panel("Stop reasons", "fraction of trajectories", (rf"{STOP_PREFIX}.*",)),
    Panel("Time per step", "seconds", (rf"{PHASE_PREFIX}.*",)),
)


def training_curves(metrics_jsonl: str | Path, png: str | Path) -> None:
    """Draw the panels of a run, over training steps.

    Thin lines are the steps, thick lines their running mean over a window that grows with the run. Non-finite values
    leave a gap and are counted above the panel.

    Raises:
        FileNotFoundError: there is no such metrics file.
        ValueError: it has no steps, or none of the metrics of the panels.
    """
    steps = read_metrics(metrics_jsonl)
    panels = panels_of(steps)
    if not panels:
        raise ValueError(f"{metrics_jsonl} has none of the metrics that training curves show")
    save_png(draw_panels(panels, steps), Path(png))


def save_png(figure: Figure, path: Path) -> None:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    atomic_write(path, content.getvalue())


def panels_of(steps: Sequence[Metrics]) -> list[Panel]:
    """The panels of `PANELS` with the metrics of the run, in order of first occurrence.

    A stop reason that never occurred has no line.
    """
    present: dict[str, None] = {}  # as an ordered set
    for metrics in steps:
        for name, value in metrics.items():
            if value or not name.startswith(STOP_PREFIX):
                present[name] = None
    panels = []
    for panel in PANELS:
        names = [name for name in present if any(re.fullmatch(pattern, name) for pattern in panel.metrics)]
        if names:
            panels.append(replace(panel, metrics=tuple(names)))
    return panels


def draw_panels(panels: Sequence[Panel], steps: Sequence[Metrics]) -> Figure:
    """The panels in a grid of at most four columns."""
    # Imported when something is drawn: a third of the time of --help. Without pyplot there is no global state.
    from matplotlib.figure import Figure

    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure((CELL[0] * columns, CELL[1] * rows), facecolor="white")
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        legend, non_finite = draw_curves(axes, panel, [("", steps)])
        axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=18)
        axes.text(0, 1.03, panel.unit, fontsize=8.5, color=GREY, transform=axes.transAxes)
        if non_finite:
            note = f"{non_finite} not finite"
            axes.text(1, 1.03, note, fontsize=8.5, color=ALARM, ha="right", transform=axes.transAxes)
        width = CELL[0] - 0.2
        if len(legend) > 1:
            axes.legend(fontsize=8.5, frameon=False, labelcolor=INK, loc="center left", bbox_to_anchor=(1, 0.5))
            width -= 0.5 + LETTER * max(len(line) for line, _ in legend)
        fit(axes, figure, (CELL[0] * column, CELL[1] * (rows - 1 - row)), (width, CELL[1] - 0.65))
    return figure


def fit(axes: Axes, figure: Figure, corner: tuple[float, float], size: tuple[float, float]) -> None:
    """Place axes with their labels in a rectangle of the figure: its lower left corner and its size in inches.

    By the number of letters, because a layout of matplotlib's draws everything twice.
    """
    labels = axes.yaxis.get_major_formatter().format_ticks(list(axes.get_yticks()))
    left = 0.13 + LETTER * max(4, *map(len, labels))
    bottom = 0.45
    box = np.array([[corner[0] + left, corner[1] + bottom], [size[0] - left, size[1] - bottom]])
    (x, y), (width, height) = box / figure.get_size_inches()
    axes.set_position((x, y, width, height))


def draw_curves(axes: Axes, panel: Panel, runs: Sequence[tuple[str, Sequence[Metrics]]]) -> tuple[Legend, int]:
    """Draw the metrics of a panel for each run, which are (label, steps); return the number of non-finite values too.

    The lines of one run are labelled by their metrics, those of several by their runs, and by both where it takes both.
    """
    legend: Legend = []
    non_finite = 0
    colors = itertools.cycle(COLORS)
    for run, steps in runs:
        for name in panel.metrics:
            measured = [(metrics["step"], metrics[name]) for metrics in steps if name in metrics]
            if not measured:
                continue
            step_N, value_N = np.array(measured, float).T
            window = max(1, len(measured) // 20)  # of the running mean: it grows with the run
            non_finite += int((~np.isfinite(value_N)).sum())
            value_N[~np.isfinite(value_N)] = np.nan
            color = next(colors)
            line = _line_label(run, label(name).rpartition("/")[2], panel, runs)
            if window > 1:
                axes.plot(step_N, value_N, color=color, linewidth=0.8, alpha=0.3)
                axes.plot(step_N, running_mean(value_N, window), color=color, linewidth=1.8, label=line)
            else:
                axes.plot(step_N, value_N, color=color, linewidth=1.6, label=line)
                draw_dots(axes, step_N, value_N, color, [line] * len(step_N))
            legend.append((line, color))
    style_axes(axes, "step", panel.y_min)
    return legend, non_finite


def _line_label(run: str, metric: str, panel: Panel, runs: Sequence[object]) -> str:
    if len(runs) == 1:
        return metric
    return run if len(panel.metrics) == 1 else f"{run}: {metric}"


def draw_dots(axes: Axes, x_N: np.ndarray, y_N: np.ndarray, color: str, labels: Sequence[str]) -> None:
    """A marker at each of few points. In an SVG their values become tooltips, see page/charts.py."""
    if len(x_N) <= MAX_MARKERS:
        for x, y, label in zip(x_N, y_N, labels, strict=True):
            if np.isfinite(y):
                axes.plot(x, y, "o", color=color, markersize=3, gid=f"tip: {label}: {y:,.6g} at {x:,.6g}")


def style_axes(axes: Axes, x_label: str, y_min: float | None) -> None:
    """The look of every plot; the y axis begins at `y_min`, unless there are smaller values."""
    from matplotlib.ticker import MaxNLocator

    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.tick_params(colors=INK, labelsize=8.5, length=0)
    axes.margins(x=0.02, y=0.12)
    axes.set_xlabel(x_label, fontsize=8.5, color=GREY, parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _position: f"{value:,.6g}")  # without an offset above the axis
    low, high = axes.dataLim.intervaly
    if y_min is not None and y_min <= low <= high:
        # The margin at the top is one of the whole axis: a flat line far above y_min would otherwise reach its title.
        axes.set_ylim(y_min, y_min + 1.12 * ((high - y_min) or 1))


def running_mean(value_N: np.ndarray, window: int) -> np.ndarray:
    """Mean over the finite values among the last `window`; NaN without any."""
    # Differences of cumulative sums would be wrong for all steps after a very large value, such as a KL of 1e20.
    windows = (value_N[max(0, end - window) : end] for end in range(1, len(value_N) + 1))
    return np.array([mean(last_X[np.isfinite(last_X)].tolist()) for last_X in windows])
