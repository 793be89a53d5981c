"""Does it learn? Trains the small model with several seeds and ablations, tests before and after, draws the curves.

python benchmarks/learning.py --out DIR [--variants tiny react ...] [--seeds 0 1 2]

Runs the commands that a user would run, each in its folder of DIR, and goes on where it was stopped. What is in DIR
then is summarised: a table on the screen and in DIR/learning.md, learning.png and tokens.png beside it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memsearcher_jax.agent.types import Stop
from memsearcher_jax.report.metrics import FILE_NAME, read_metrics
from memsearcher_jax.report.page_facts import Facts, read_run
from memsearcher_jax.report.plots import COLORS, running_mean

LAUNCH = Path(__file__).resolve().parents[1] / "launch"
VARIANTS = {
    "tiny": ["--config", "tiny"],
    "last context": ["--config", "tiny", "--rl.credit", "last context"],
    "no memory": ["--config", "tiny", "--agent.remember", "False"],
    "react": ["--config", "tiny_react"],
}
LABELS = {
    "tiny": "MemSearcher",
    "last context": "only the last context is trained",
    "no memory": "the memory stays empty",
    "react": "ReAct",
}
START = "start"
TEMPERATURES = {"sampled": 1.0, "greedy": 0.0}
LONG = ["--data.world.hops", "4", "5", "6", "7", "--agent.question_tokens", "48", "--sampling.context_tokens"]
"""Questions of so many hops that a trajectory has eight turns; training saw three hops at most."""
ROOM = {"tiny": "384", "react": "1024"}
FEW = 10  # trajectories; turns that fewer reached are not drawn


@dataclass(frozen=True)
class Flags:
    """What to run."""

    out: Path
    """Folder of all runs and of the summary."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    """Which to train: tiny, "last context", "no memory", react."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the training runs; the world is the same."""
    steps: int | None = None
    """Training steps, if not those of the preset."""


def main(flags: Flags) -> None:
    unknown = set(flags.variants) - set(VARIANTS)
    if unknown:
        raise SystemExit(f"error: no variant {unknown.pop()!r}: choose among {', '.join(VARIANTS)}")
    examine(flags.out, START, ["--config", "tiny"])
    for variant in flags.variants:
        for seed in flags.seeds:
            name = f"{variant}, seed {seed}"
            train(flags.out / name, [*VARIANTS[variant], "--seed", str(seed)], flags.steps)
            examine(flags.out, name, ["--checkpoint", str(flags.out / name)])
    for variant in set(flags.variants) & set(ROOM):
        run = flags.out / f"{variant}, seed {flags.seeds[0]}"
        evaluate(flags.out / f"{run.name}, long", ["--checkpoint", str(run), *LONG, ROOM[variant]])
    table = summary(flags.out)
    (flags.out / "learning.md").write_text(table, encoding="utf-8")
    draw_learning(flags.out).savefig(flags.out / "learning.png", dpi=120)
    draw_tokens(flags.out).savefig(flags.out / "tokens.png", dpi=120)
    print(table)


def train(folder: Path, arguments: Sequence[str], steps: int | None) -> None:
    """One run, or what is left of it."""
    told = ["--resume"] if (folder / "run.json").is_file() else list(arguments)
    command("tpu_train", [*told, "--out", str(folder), *(["--rl.steps", str(steps)] if steps else [])])


def examine(out: Path, name: str, arguments: Sequence[str]) -> None:
    """All test questions, drawn and greedy."""
    for how, temperature in TEMPERATURES.items():
        evaluate(out / f"{name}, {how}", [*arguments, "--evaluation.temperature", str(temperature)])


def evaluate(folder: Path, arguments: Sequence[str]) -> None:
    if not (folder / "results.json").is_file():
        told = ["--resume"] if (folder / "run.json").is_file() else list(arguments)
        command("evaluate", [*told, "--out", str(folder)])


def command(program: str, arguments: Sequence[str]) -> None:
    print(f"$ python launch/{program}.py", *arguments, flush=True)
    subprocess.run([sys.executable, str(LAUNCH / f"{program}.py"), *arguments], check=True)


def summary(out: Path) -> str:
    """Markdown: exact match on the test questions, by hops too, and the time of training; medians over seeds last."""
    head = ["run", "minutes", *(f"{how}{part}" for how in TEMPERATURES for part in ("", " 1", " 2", " 3"))]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for name in (START, *(f"{variant}, seed {seed}" for variant, seed in trained(out))):
        scores = [score for how in TEMPERATURES for score in exact_matches(out / f"{name}, {how}")]
        lines.append(" | ".join([name, minutes(out / name), *(f"{score:.3f}" for score in scores)]))
    return "".join(f"| {line} |\n" for line in lines)


def trained(out: Path) -> list[tuple[str, int]]:
    """The runs in the folder that have been examined."""
    found = []
    for variant in VARIANTS:
        for folder in sorted(out.glob(f"{variant}, seed *, greedy/results.json")):
            found.append((variant, int(folder.parent.name.split()[-2].rstrip(","))))
    return found


def exact_matches(folder: Path) -> list[float]:
    """Of all questions, and of those of one, two and three hops."""
    metrics = json.loads((folder / "results.json").read_text())["metrics"]
    return [metrics["exact_match"], *(metrics[f"exact_match/{hops}_hops"] for hops in (1, 2, 3))]


def minutes(folder: Path) -> str:
    if not (folder / FILE_NAME).is_file():
        return ""
    phases = [value for step in read_metrics(folder / FILE_NAME) for name, value in step.items() if "seconds/" in name]
    return f"{sum(phases) / 60:.1f}"


def draw_learning(out: Path) -> Figure:
    """Exact match of the sampled trajectories, all and by hops; a line for each variant, thin ones for its seeds."""
    figure = Figure(figsize=(14, 3.7), layout="constrained", facecolor="white")
    panels = {"All questions": "exact_match"} | {
        f"{hops} hop{'s' * (hops > 1)}": f"exact_match/{hops}_hops" for hops in (1, 2, 3)
    }
    for axes, (title, metric) in zip(figure.subplots(1, 4, sharey=True), panels.items(), strict=True):
        for color, variant in zip(COLORS, VARIANTS, strict=False):
            curves = [curve(out / f"{variant}, seed {seed}", metric) for one, seed in trained(out) if one == variant]
            draw_curves(axes, curves, color, LABELS[variant])
        style(axes, title, "step")
    figure.axes[0].set_ylim(0, 1)
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(VARIANTS), frameon=False, fontsize=9)
    return figure


def curve(folder: Path, metric: str) -> np.ndarray:
    """float64 [steps], a running mean over eight of them."""
    return running_mean(np.array([step.get(metric, np.nan) for step in read_metrics(folder / FILE_NAME)]), 8)


def draw_curves(axes: Axes, curves: Sequence[np.ndarray], color: str, label: str) -> None:
    for values in curves:
        axes.plot(values, color=color, linewidth=0.8, alpha=0.4)
    if curves:
        shortest = min(map(len, curves))
        axes.plot(np.mean([values[:shortest] for values in curves], axis=0), color=color, linewidth=2, label=label)


def draw_tokens(out: Path) -> Figure:
    """Tokens in context by turn, of trajectories with many turns; the slopes stand in the legend."""
    figure = Figure(figsize=(6, 3.8), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for color, variant in zip(COLORS, ROOM, strict=False):
        for folder in sorted(out.glob(f"{variant}, seed *, long/results.json"))[:1]:
            lengths = searched(read_run(folder.parent, most=1_000_000).facts)
            turns = by_turn(lengths)
            label = f"{LABELS[variant]}: {slope(lengths):+.1%} a turn"
            axes.plot(list(turns), list(turns.values()), color=color, marker="o", label=label)
    style(axes, "Tokens in context when a turn ends", "turn")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9)
    return figure


def searched(facts: Iterable[Facts]) -> list[np.ndarray]:
    """For each trajectory its tokens by turn, without the turn that answers: nothing is read in it."""
    return [
        np.array(one.tokens_of_turns[: len(one.tokens_of_turns) - (one.stop is Stop.ANSWERED)], float) for one in facts
    ]


def by_turn(lengths: Sequence[np.ndarray]) -> dict[int, float]:
    """Mean tokens of the turns, from the first on, that enough trajectories reached."""
    most = max(map(len, lengths))
    reached = {turn: [one[turn - 1] for one in lengths if len(one) >= turn] for turn in range(1, most + 1)}
    return {turn: statistics.fmean(values) for turn, values in reached.items() if len(values) >= FEW}


def slope(lengths: Sequence[np.ndarray]) -> float:
    """Growth of a trajectory's tokens from the second turn on, a turn, as a share of their mean.

    Least squares with an intercept for each trajectory: long questions have more turns and more tokens in all of them.
    """
    late = [one[1:8] for one in lengths if len(one) > 2]
    turn = np.concatenate([np.arange(len(one)) - (len(one) - 1) / 2 for one in late])
    tokens = np.concatenate([one - one.mean() for one in late])
    return float(turn @ tokens / (turn @ turn) / np.concatenate(late).mean())


def style(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(below)
    axes.grid(axis="y", color="#E3E3E3")
    axes.spines[["top", "right", "left"]].set_visible(False)


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
