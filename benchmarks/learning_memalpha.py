"""Does the reader of streams learn? Trains tiny_memalpha with several seeds, tests on short and long streams, draws it.

python benchmarks/learning_memalpha.py --out DIR [--baselines position pooled] [--seeds 0 1 2]

Each seed is trained with each baseline of a reward. The readers that keep no memory answer the same test streams. Runs
the commands that a user would run, each in its folder of DIR, and goes on where it was stopped. What is in DIR then is
summarised: tables on the screen and in DIR/learning.md, and learning.png beside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from learning import START, TEMPERATURES, draw_curves, evaluate, examine, minutes, style, train
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memsearcher_jax.report.metrics import FILE_NAME, read_metrics
from memsearcher_jax.report.plots import COLORS
from memsearcher_jax.report.trajectories import read_trajectories, step_path

PRESET = ["--config", "tiny_memalpha"]
BASELINES = ("position", "pooled")
READERS = ("rag", "long_context")
AFTER = (0, 1, 2, 3, 5, 7, 10, 15)  # steps of training, whose accuracies stand in the table
CURVES = {
    "Questions answered right": "accuracy",
    "Calls of a stream": "calls",
    "Tokens of a memory": "memory_tokens",
}


@dataclass(frozen=True)
class Flags:
    """What to run."""

    out: Path
    """Folder of all runs and of the summary."""
    baselines: tuple[str, ...] = BASELINES
    """Which to train with: position, the preset's, or pooled."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the training runs; the streams are the same."""
    steps: int | None = None
    """Training steps, if not those of the preset."""


def main(flags: Flags) -> None:
    unknown = set(flags.baselines) - set(BASELINES)
    if unknown:
        raise SystemExit(f"error: no baseline {unknown.pop()!r}: choose among {', '.join(BASELINES)}")
    examine(flags.out, START, PRESET)
    for reader in READERS:
        evaluate(flags.out / reader, [*PRESET, "--memalpha.reader", reader])
    for baseline in flags.baselines:
        for seed in flags.seeds:
            name = f"{baseline}, seed {seed}"
            train(flags.out / name, [*PRESET, "--rl.baseline", baseline, "--seed", str(seed)], flags.steps)
            examine(flags.out, name, ["--checkpoint", str(flags.out / name)])
    tables = "\n".join((summary(flags.out), readers(flags.out), while_training(flags.out)))
    (flags.out / "learning.md").write_text(tables, encoding="utf-8")
    draw(flags.out).savefig(flags.out / "learning.png", dpi=120)
    print(tables)


def trained(out: Path, baseline: str = "") -> list[str]:
    """The runs in the folder that have been examined; all, or those with one baseline."""
    last, found = list(TEMPERATURES)[-1], []
    for one in (baseline,) if baseline else BASELINES:
        folders = sorted(out.glob(f"{one}, seed *, {last}/results.json"))
        found += [folder.parent.name.removesuffix(f", {last}") for folder in folders]
    return found


def summary(out: Path) -> str:
    """Markdown: accuracy on test streams of each length, and what is left of it on the longest, drawn and greedy."""
    lengths = list(accuracies(out / f"{START}, sampled"))
    head = ["run", "minutes"]
    for how in TEMPERATURES:
        head += [*(f"{how}, {length} chunks" for length in lengths), f"{lengths[-1]} over {lengths[0]}"]
    rows = []
    for name in (START, *trained(out)):
        cells = [name, minutes(out / name)]
        for how in TEMPERATURES:
            found = accuracies(out / f"{name}, {how}")
            cells += [*(f"{value:.3f}" for value in found.values()), f"{found[lengths[-1]] / found[lengths[0]]:.3f}"]
        rows.append(cells)
    return markdown(head, rows)


def readers(out: Path) -> str:
    """Markdown: accuracy of those who answer from the stream itself; they draw nothing."""
    found = {reader: accuracies(out / reader) for reader in READERS}
    head = ["answered from the stream by", *(f"{length} chunks" for length in found[READERS[0]])]
    return markdown(head, [[name, *(f"{value:.3f}" for value in values.values())] for name, values in found.items()])


def while_training(out: Path) -> str:
    """Markdown: accuracy on the streams of a step after so many steps, and what a chunk's place explains of rewards."""
    rows = []
    for name in trained(out):
        accuracy = values(out / name, "accuracy")
        shares = [place_share(out / name, step) for step in (0, len(accuracy) - 1)]
        rows.append([name, *(f"{accuracy[step]:.2f}" for step in AFTER if step < len(accuracy))])
        rows[-1] += [f"{share:.2f}" for share in shares]
    return markdown(["after steps", *map(str, AFTER), "place, first step", "place, last step"], rows)


def place_share(run: Path, step: int) -> float:
    """The share of the variance of a problem's rewards that the place of the chunk explains, mean over problems.

    It is 0 where rollouts alone differ, and 1 / G of G rollouts where every reward is drawn by itself.
    """
    groups: dict[str, list[tuple[float, ...]]] = {}
    for one in read_trajectories(step_path(run, step)):
        groups.setdefault(one.trajectory.problem.id, []).append(one.context_rewards)
    shares = []
    for rewards in groups.values():
        reward_GC = np.array(rewards)
        if reward_GC.std() > 0:
            shares.append(reward_GC.mean(axis=0).var() / reward_GC.var())
    return float(np.mean(shares)) if shares else 0.0


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))


def accuracies(folder: Path) -> dict[int, float]:
    """Accuracy by the number of chunks, from the shortest streams on."""
    found = json.loads((folder / "results.json").read_text())["streams"]
    return {round(one["chunks"]): one["accuracy"] for name, one in sorted_by_length(found) if "chunks" in name}


def sorted_by_length(streams: dict) -> list[tuple[str, dict]]:
    return sorted(streams.items(), key=lambda entry: entry[1]["chunks"])


def draw(out: Path) -> Figure:
    """What is answered, written and kept while training, thin lines for the seeds; then accuracy by length."""
    figure = Figure(figsize=(14, 3.7), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(CURVES) + 1)
    for axes, (title, metric) in zip(panels, CURVES.items(), strict=False):
        for color, baseline in zip(COLORS[1:], BASELINES, strict=False):
            draw_curves(axes, [values(out / name, metric) for name in trained(out, baseline)], color, baseline)
        style(axes, title, "step")
        axes.set_ylim(bottom=0)
    panels[0].set_ylim(0, 1)
    if len({name.partition(",")[0] for name in trained(out)}) > 1:
        panels[0].legend(frameon=False, fontsize=9, title="baseline", loc="lower right")
    draw_lengths(panels[-1], out)
    return figure


def values(folder: Path, metric: str) -> np.ndarray:
    """float64 [steps]; there are too few for a running mean."""
    return np.array([step[metric] for step in read_metrics(folder / FILE_NAME)])


def draw_lengths(axes: Axes, out: Path) -> None:
    """Accuracy on test streams, sampled, by their chunks: of the start, and the mean of the seeds with their range."""
    groups = {"start": [START]} | {baseline: trained(out, baseline) for baseline in BASELINES}
    groups = {label: names for label, names in groups.items() if names}
    width = 0.8 / len(groups)
    for place, (label, names) in enumerate(groups.items()):
        values_RL = np.array([list(accuracies(out / f"{name}, sampled").values()) for name in names])
        lengths = list(accuracies(out / f"{names[0]}, sampled"))
        mean_L = values_RL.mean(axis=0)
        spread = [mean_L - values_RL.min(axis=0), values_RL.max(axis=0) - mean_L]
        place_L = np.arange(len(lengths)) + width * (place - (len(groups) - 1) / 2)
        axes.bar(place_L, mean_L, 0.9 * width, yerr=spread, color=COLORS[place], label=label)
        axes.set_xticks(np.arange(len(lengths)), [str(length) for length in lengths])
    style(axes, "On test streams, by length", "chunks")
    axes.set_axisbelow(True)
    axes.set_ylim(0, 1.2)
    axes.legend(frameon=False, fontsize=9, ncols=len(groups), loc="upper center")


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
