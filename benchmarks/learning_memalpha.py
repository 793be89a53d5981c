"""Does the reader of streams learn? Trains tiny_memalpha with several seeds, tests on short and long streams, draws it.

python benchmarks/learning_memalpha.py --out DIR [--seeds 0 1 2]

Runs the commands that a user would run, each in its folder of DIR, and goes on where it was stopped. What is in DIR
then is summarised: a table on the screen and in DIR/learning.md, and learning.png beside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from learning import START, TEMPERATURES, draw_curves, examine, minutes, style, train
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memsearcher_jax.report.metrics import FILE_NAME, read_metrics
from memsearcher_jax.report.plots import COLORS

PRESET = ["--config", "tiny_memalpha"]
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
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the training runs; the streams are the same."""
    steps: int | None = None
    """Training steps, if not those of the preset."""


def main(flags: Flags) -> None:
    examine(flags.out, START, PRESET)
    for seed in flags.seeds:
        name = f"seed {seed}"
        train(flags.out / name, [*PRESET, "--seed", str(seed)], flags.steps)
        examine(flags.out, name, ["--checkpoint", str(flags.out / name)])
    table = summary(flags.out)
    (flags.out / "learning.md").write_text(table, encoding="utf-8")
    draw(flags.out).savefig(flags.out / "learning.png", dpi=120)
    print(table)


def trained(out: Path) -> list[str]:
    """The runs in the folder that have been examined."""
    last = list(TEMPERATURES)[-1]
    return sorted(folder.parent.name.removesuffix(f", {last}") for folder in out.glob(f"seed *, {last}/results.json"))


def summary(out: Path) -> str:
    """Markdown: accuracy on test streams of each length, and what is left of it on the longest, drawn and greedy."""
    lengths = list(accuracies(out / f"{START}, sampled"))
    head = ["run", "minutes"]
    for how in TEMPERATURES:
        head += [*(f"{how}, {length} chunks" for length in lengths), f"{lengths[-1]} over {lengths[0]}"]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for name in (START, *trained(out)):
        cells = [name, minutes(out / name)]
        for how in TEMPERATURES:
            found = accuracies(out / f"{name}, {how}")
            cells += [*(f"{value:.3f}" for value in found.values()), f"{found[lengths[-1]] / found[lengths[0]]:.3f}"]
        lines.append(" | ".join(cells))
    return "".join(f"| {line} |\n" for line in lines)


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
    for axes, color, (title, metric) in zip(panels, COLORS, CURVES.items(), strict=False):
        draw_curves(axes, [values(out / name, metric) for name in trained(out)], color, title)
        style(axes, title, "step")
        axes.set_ylim(bottom=0)
    panels[0].set_ylim(0, 1)
    draw_lengths(panels[-1], out, trained(out))
    return figure


def values(folder: Path, metric: str) -> np.ndarray:
    """float64 [steps]; there are too few for a running mean."""
    return np.array([step[metric] for step in read_metrics(folder / FILE_NAME)])


def draw_lengths(axes: Axes, out: Path, runs: Sequence[str]) -> None:
    """Accuracy on test streams, sampled, by their chunks: of the start, and the mean of the seeds with their range."""
    for offset, (label, names) in enumerate({"start": [START], "trained": list(runs)}.items()):
        values_RL = np.array([list(accuracies(out / f"{name}, sampled").values()) for name in names])
        lengths = list(accuracies(out / f"{names[0]}, sampled"))
        mean_L = values_RL.mean(axis=0)
        spread = [mean_L - values_RL.min(axis=0), values_RL.max(axis=0) - mean_L]
        place_L = np.arange(len(lengths)) + 0.4 * offset - 0.2
        axes.bar(place_L, mean_L, 0.36, yerr=spread, color=COLORS[offset], label=label)
        axes.set_xticks(np.arange(len(lengths)), [str(length) for length in lengths])
    style(axes, "On test streams, by length", "chunks")
    axes.set_axisbelow(True)
    axes.set_ylim(0, 1.2)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper center")


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
