"""Learning curves of Mem-alpha: trains tiny_memalpha with several seeds and tests on short and long streams.

python benchmarks/learning_memalpha.py --out DIR [--baselines position pooled] [--seeds 0 1 2]

Every seed is trained with every reward baseline. Readers without a memory answer questions on the same test streams.
Each command runs in a folder of DIR, and an interrupted benchmark continues where it stopped. The summary of all runs
is a set of tables, printed and written to DIR/learning.md, and the plot DIR/learning.png.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from learning import (
    START,
    TEMPERATURES,
    Runs,
    draw_curves,
    evaluate,
    examine,
    markdown,
    minutes,
    style,
    train_all,
    trained,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memsearcher_jax.logs.metrics import METRICS_FILE, read_metrics
from memsearcher_jax.logs.trajectories import read_trajectories, step_path
from memsearcher_jax.report.plots import COLORS

PRESET = ["--config", "tiny_memalpha"]
BASELINES = ("position", "pooled")
READERS = ("rag", "long_context")
REPORTED_STEPS = (0, 1, 2, 3, 5, 7, 10, 15)  # training steps whose accuracies are in the table
CURVES = {
    "Questions answered correctly": "accuracy",
    "Calls per stream": "calls",
    "Memory tokens": "memory_tokens",
}


@dataclass(frozen=True, kw_only=True)
class Flags(Runs):
    """What to run."""

    baselines: tuple[Literal["position", "pooled"], ...] = BASELINES
    """Reward baselines to train with; the preset has position."""


def main(flags: Flags) -> None:
    examine(flags.out, START, PRESET)
    for reader in READERS:
        evaluate(flags.out / reader, [*PRESET, "--memalpha.answer_from", reader])
    train_all(flags, {baseline: [*PRESET, "--rl.advantage_scope", baseline] for baseline in flags.baselines})
    tables = "\n".join((summary(flags.out), readers(flags.out), training_progress(flags.out)))
    (flags.out / "learning.md").write_text(tables, encoding="utf-8")
    draw(flags.out).savefig(flags.out / "learning.png", dpi=120)
    print(tables)


def summary(out: Path) -> str:
    """Markdown: accuracy on test streams by length, and its ratio of longest to shortest, sampled and greedy."""
    lengths = list(accuracies(out / f"{START}, sampled"))
    head = ["run", "minutes"]
    for decoding in TEMPERATURES:
        head += [*(f"{decoding}, {length} chunks" for length in lengths), f"{lengths[-1]} over {lengths[0]}"]
    rows = []
    for name in (START, *trained(out, BASELINES)):
        cells = [name, minutes(out / name)]
        for decoding in TEMPERATURES:
            by_length = list(accuracies(out / f"{name}, {decoding}").values())
            cells += [f"{value:.3f}" for value in (*by_length, by_length[-1] / by_length[0])]
        rows.append(cells)
    return markdown(head, rows)


def readers(out: Path) -> str:
    """Markdown: accuracy of readers that answer from the stream without a memory; they sample nothing."""
    by_reader = {reader: accuracies(out / reader) for reader in READERS}
    head = ["answered from the stream by", *(f"{length} chunks" for length in by_reader[READERS[0]])]
    return markdown(
        head, [[name, *(f"{value:.3f}" for value in values.values())] for name, values in by_reader.items()]
    )


def training_progress(out: Path) -> str:
    """Markdown: training accuracy by step, and the share of the reward variance that chunk position explains."""
    rows = []
    for name in trained(out, BASELINES):
        accuracy = values(out / name, "accuracy")
        shares = [position_share(out / name, step) for step in (0, len(accuracy) - 1)]
        rows.append([name, *(f"{accuracy[step]:.2f}" for step in REPORTED_STEPS if step < len(accuracy))])
        rows[-1] += [f"{share:.2f}" for share in shares]
    return markdown(["after steps", *map(str, REPORTED_STEPS), "position, first step", "position, last step"], rows)


def position_share(run: Path, step: int) -> float:
    """The share of the variance of a problem's rewards that the chunk position explains, averaged over problems.

    It is 0 if only rollouts differ, and 1 / G on average for independent rewards of G rollouts.
    """
    groups: dict[str, list[tuple[float, ...]]] = {}
    for scored in read_trajectories(step_path(run, step)):
        groups.setdefault(scored.trajectory.problem.id, []).append(scored.context_rewards)
    shares = []
    for rewards in groups.values():
        reward_GC = np.array(rewards)
        if reward_GC.std() > 0:
            shares.append(reward_GC.mean(axis=0).var() / reward_GC.var())
    return float(np.mean(shares)) if shares else 0.0


def accuracies(folder: Path) -> dict[int, float]:
    """Accuracy by the number of chunks, in ascending order."""
    streams = json.loads((folder / "results.json").read_text())["streams"]
    by_chunks = sorted((group["chunks"], group["accuracy"]) for name, group in streams.items() if "chunks" in name)
    return {round(chunks): accuracy for chunks, accuracy in by_chunks}


def draw(out: Path) -> Figure:
    """Plots accuracy, calls and memory tokens during training, with thin lines for seeds, and accuracy by length."""
    figure = Figure(figsize=(14, 3.7), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(CURVES) + 1)
    for axes, (title, metric) in zip(panels, CURVES.items(), strict=False):
        for color, baseline in zip(COLORS[1:], BASELINES, strict=False):
            draw_curves(axes, [values(out / name, metric) for name in trained(out, [baseline])], color, baseline)
        style(axes, title, "step")
        axes.set_ylim(bottom=0)
    panels[0].set_ylim(0, 1)
    if len({name.partition(",")[0] for name in trained(out, BASELINES)}) > 1:
        panels[0].legend(frameon=False, fontsize=9, title="baseline", loc="lower right")
    draw_lengths(panels[-1], out)
    return figure


def values(folder: Path, metric: str) -> np.ndarray:
    """float64 [steps], without a running mean because there are few steps."""
    return np.array([step[metric] for step in read_metrics(folder / METRICS_FILE)])


def draw_lengths(axes: Axes, out: Path) -> None:
    """Sampled accuracy on test streams by length: the initial policy, and the mean and range over seeds."""
    groups = {"start": [START]} | {baseline: trained(out, [baseline]) for baseline in BASELINES}
    groups = {label: names for label, names in groups.items() if names}
    width = 0.8 / len(groups)
    for index, (label, names) in enumerate(groups.items()):
        values_RL = np.array([list(accuracies(out / f"{name}, sampled").values()) for name in names])
        lengths = list(accuracies(out / f"{names[0]}, sampled"))
        mean_L = values_RL.mean(axis=0)
        spread = [mean_L - values_RL.min(axis=0), values_RL.max(axis=0) - mean_L]
        position_L = np.arange(len(lengths)) + width * (index - (len(groups) - 1) / 2)
        axes.bar(position_L, mean_L, 0.9 * width, yerr=spread, color=COLORS[index], label=label)
        axes.set_xticks(np.arange(len(lengths)), [str(length) for length in lengths])
    style(axes, "Accuracy on test streams, by length", "chunks")
    axes.set_axisbelow(True)
    axes.set_ylim(0, 1.2)
    axes.legend(frameon=False, fontsize=9, ncols=len(groups), loc="upper center")


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
