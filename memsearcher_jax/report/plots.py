"""Curves of a training run as one PNG."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from memsearcher_jax.report.files import replacing
from memsearcher_jax.report.metrics import Metrics, read_metrics
from memsearcher_jax.report.names import PHASE_PREFIX, STOP_PREFIX, Name

# Okabe and Ito's palette: told apart by readers with any colour vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK, FAINT, GRID, ALARM = "#333333", "#777777", "#E3E3E3", "#B00020"
COLUMNS = 4


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    names: tuple[str, ...]
    floor: float | None = None  # bottom of the axis where 0 means something


PANELS = (
    Panel("Reward", "mean over trajectories", (Name.REWARD,), 0.0),
    Panel("Exact match", "share of trajectories", (Name.EXACT_MATCH,), 0.0),
    Panel("Turns", "mean over trajectories", (Name.TURNS,), 0.0),
    Panel("Tokens per turn", "mean over turns", (Name.TOKENS_PER_TURN,), 0.0),
    Panel("Memory", "tokens, mean over trajectories", (Name.MEMORY_TOKENS,), 0.0),
    Panel("Entropy", "nats per token", (Name.ENTROPY,), 0.0),
    Panel("KL from the start", "nats per token", (Name.KL,)),
    Panel("KL of a step", "old − new, nats per token", (Name.APPROXIMATE_KL,)),
    Panel("Sampler against trainer", "mean |Δ log-probability|", (Name.LOGPROB_DIFFERENCE,), 0.0),
    Panel("Idle slots", "share of the sampler's slots", (Name.IDLE_SLOT_SHARE,), 0.0),
    Panel("Search", "seconds: mean, and what 95 of 100 stay below", (Name.SEARCH_SECONDS, Name.SEARCH_SECONDS_95), 0.0),
    Panel("Device memory", "GB in use, and at most", (Name.DEVICE_GB, Name.DEVICE_PEAK_GB), 0.0),
)


def training_curves(metrics_jsonl: str | Path, png: str | Path) -> None:
    """Draws one small panel per quantity that the run measured, over training steps.

    Thin lines are the steps, thick lines their mean over a window that grows with the run. Steps that are not finite
    leave a gap and are counted above the panel.

    Raises:
        FileNotFoundError: there is no such metrics file.
        ValueError: it holds no step, or none of the quantities that the panels show.
    """
    steps = read_metrics(metrics_jsonl)
    if not steps:
        raise ValueError(f"{metrics_jsonl} holds no step to plot")
    panels = panels_of(steps) + family_panels(steps)
    if not panels:
        raise ValueError(f"{metrics_jsonl} holds none of the quantities that training curves show")
    figure = draw_panels(panels, steps)
    with replacing(Path(png)) as file:
        figure.savefig(file, format="png", dpi=120)


def panels_of(steps: Sequence[Metrics]) -> list[Panel]:
    """Those of one line each whose quantity the run measured."""
    return [panel for panel in PANELS if any(name in metrics for metrics in steps for name in panel.names)]


def family_panels(steps: Sequence[Metrics]) -> list[Panel]:
    """Those with a line for each member of a family of metrics, in the order in which these were first written.

    A reason to stop that never occurred has no line.
    """
    met = {name: None for metrics in steps for name, value in metrics.items() if value or PHASE_PREFIX in name}
    families = (
        ("Exact match by hops", "share of trajectories", rf"{Name.EXACT_MATCH}/\d+_hops"),
        ("How trajectories end", "share of trajectories", rf"{STOP_PREFIX}.*"),
        ("Time of a step", "seconds", rf"{PHASE_PREFIX}.*"),
    )
    panels = [
        Panel(title, unit, tuple(name for name in met if re.fullmatch(pattern, name)), 0.0)
        for title, unit, pattern in families
    ]
    return [panel for panel in panels if panel.names]


def label_of(name: str) -> str:
    """What a legend calls a member of a family: "2 hops", "answered", "rollout"."""
    return name.rsplit("/", 1)[-1].replace("_", " ")


def draw_panels(panels: Sequence[Panel], steps: Sequence[Metrics]) -> Figure:
    """The panels side by side, four in a row at most."""
    # A Figure of its own, not pyplot's: no global state, and PNG is drawn without a display.
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.7 * rows), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, hspace=0.04)
    grid = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axes, panel in zip(grid, panels, strict=False):
        _draw_panel(axes, panel, steps)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    return figure


def _draw_panel(axes: Axes, panel: Panel, steps: Sequence[Metrics]) -> None:
    step_T = np.array([metrics["step"] for metrics in steps])
    window = max(1, len(steps) // 20)
    lost = 0
    for color, name in zip(_cycle(COLORS, len(panel.names)), panel.names, strict=True):
        value_T = np.array([metrics.get(name, np.nan) for metrics in steps])
        lost += sum(name in metrics and not np.isfinite(metrics[name]) for metrics in steps)
        value_T[~np.isfinite(value_T)] = np.nan
        label = label_of(name)
        if window > 1:
            axes.plot(step_T, value_T, color=color, linewidth=0.8, alpha=0.3)
            axes.plot(step_T, running_mean(value_T, window), color=color, linewidth=1.8, label=label)
        else:
            axes.plot(step_T, value_T, color=color, linewidth=1.6, marker="o", markersize=3, label=label)
    _style(axes, panel)
    if lost:
        note = f"{lost} not finite"
        axes.text(1, 1.03, note, fontsize=8.5, color=ALARM, ha="right", transform=axes.transAxes)


def _style(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=18)
    axes.text(0, 1.03, panel.unit, fontsize=8.5, color=FAINT, transform=axes.transAxes)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8.5, length=0)
    axes.margins(x=0.02, y=0.12)
    axes.set_xlabel("step", fontsize=8.5, color=FAINT)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _position: f"{value:,.6g}")  # never a power of ten above the axis
    if panel.floor is not None:
        axes.set_ylim(bottom=panel.floor)
    if len(panel.names) > 1:
        axes.legend(fontsize=8.5, frameon=False, labelcolor=INK, loc="center left", bbox_to_anchor=(1, 0.5))


def running_mean(value_T: np.ndarray, window: int) -> np.ndarray:
    """Mean over the last `window` values that are numbers; NaN where there is none."""
    known_T = np.isfinite(value_T)
    total_T = np.cumsum(np.where(known_T, value_T, 0.0))
    count_T = np.cumsum(known_T)
    total_T[window:] -= total_T[:-window].copy()
    count_T[window:] -= count_T[:-window].copy()
    return np.divide(total_T, count_T, out=np.full(len(value_T), np.nan), where=count_T > 0)


def _cycle(colors: Sequence[str], count: int) -> list[str]:
    return [colors[index % len(colors)] for index in range(count)]
