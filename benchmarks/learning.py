"""Learning curves: trains the small model with several seeds and ablations, and tests it before and after.

python benchmarks/learning.py --out DIR [--variants tiny react ...] [--seeds 0 1 2]

Without --variants it runs the ablations. Each command runs in a folder of DIR, and an interrupted benchmark continues
where it stopped. The summary of all runs is a table, printed and written to DIR/learning.md, and the plots
DIR/learning.png and DIR/tokens.png, of the chosen variants.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from common import REPOSITORY
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memsearcher_jax.logs.metrics import METRICS_FILE, read_metrics
from memsearcher_jax.report.page.run_data import read_run
from memsearcher_jax.report.plots import COLORS, running_mean
from memsearcher_jax.types import StopReason, TrajectorySummary


@dataclass(frozen=True)
class Variant:
    label: str
    arguments: tuple[str, ...] = ()
    config: str = "tiny"


ABLATIONS = {
    "tiny": Variant("MemSearcher"),
    "last context": Variant("only the last context is trained", ("--rl.credit", "last_context")),
    "no memory": Variant("the memory stays empty", ("--agent.carry_memory", "False")),
    "react": Variant("ReAct", config="tiny_react"),
}
REWARDS = {
    "exact match": Variant("exact match", ("--reward.metric", "exact_match")),
    "cover": Variant("the answer contains a golden one", ("--reward.metric", "cover_exact_match")),
    "no format": Variant("nothing for the format", ("--reward.wrong_answer", "0")),
    "turn cost": Variant("0.05 less per turn", ("--reward.turn_cost", "0.05")),
    "evidence": Variant("0.3 for supporting titles", ("--reward.evidence", "0.3")),
}
WORKFLOWS = {
    "search_r1": Variant("Search-R1", config="tiny_search_r1"),
    "rag": Variant("RAG", config="tiny_rag"),
    "direct": Variant("direct answers", config="tiny_direct"),
}
LORA = {"lora": Variant("LoRA of rank 16", ("--model.lora_rank", "16", "--training.learning_rate", "1e-3"))}
DECOUPLED = ("--training.old_logprobs", "trainer", "--training.tis_cap", "2")
CARRY_OVER = {
    "carry over 1": Variant("carried over at most one step", ("--rl.carry_over", "1")),
    "carry over 2": Variant("at most two steps", ("--rl.carry_over", "2")),
    "carry over 2 decoupled": Variant("two steps, decoupled objective", ("--rl.carry_over", "2", *DECOUPLED)),
}
VARIANTS = ABLATIONS | REWARDS | WORKFLOWS | LORA | CARRY_OVER
START = "start"
TEMPERATURES = {"sampled": 1.0, "greedy": 0.0}
LONG = ["--data.encyclopedia.hops", "4", "5", "6", "7", "--agent.question_tokens", "48", "--sampling.context_tokens"]
"""Questions with enough hops for trajectories of eight turns; training has at most three hops."""
CONTEXT_TOKENS = {"tiny": "384", "react": "1024"}
MIN_TRAJECTORIES = 10  # turns that fewer trajectories reached are not drawn


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Flags of all learning benchmarks."""

    out: Path
    """Folder of all runs and of the summary."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the training runs; the data is the same."""
    steps: int | None = None
    """Training steps, if not those of the preset."""


@dataclass(frozen=True, kw_only=True)
class Flags(Runs):
    """Flags of this benchmark."""

    variants: tuple[Literal[*VARIANTS], ...] = tuple(ABLATIONS)
    """Variants to train."""


def main(flags: Flags) -> None:
    chosen = {name: VARIANTS[name] for name in flags.variants}
    starts = {START if one.config == "tiny" else f"{START} {name}": one.config for name, one in chosen.items()}
    for name, config in starts.items():
        examine(flags.out, name, ["--config", config])
    train_all(flags, {name: ["--config", one.config, *one.arguments] for name, one in chosen.items()})
    for variant in set(flags.variants) & set(CONTEXT_TOKENS):
        run = flags.out / f"{variant}, seed {flags.seeds[0]}"
        evaluate(flags.out / f"{run.name}, long", ["--checkpoint", str(run), *LONG, CONTEXT_TOKENS[variant]])
    table = summary(flags.out, [*starts, *trained(flags.out, chosen)])
    (flags.out / "learning.md").write_text(table, encoding="utf-8")
    draw_learning(flags.out, chosen).savefig(flags.out / "learning.png", dpi=120)
    draw_tokens(flags.out).savefig(flags.out / "tokens.png", dpi=120)
    print(table)


def train_all(runs: Runs, variants: Mapping[str, Sequence[str]]) -> None:
    """Train every variant, given by its arguments, with every seed, and test the results."""
    for variant, arguments in variants.items():
        for seed in runs.seeds:
            name = f"{variant}, seed {seed}"
            steps = ["--rl.steps", str(runs.steps)] if runs.steps else []
            command("tpu_train", runs.out / name, [*arguments, "--seed", str(seed)], steps)
            examine(runs.out, name, ["--checkpoint", str(runs.out / name)])


def examine(out: Path, name: str, arguments: Sequence[str]) -> None:
    """Evaluate on all test questions, sampled and greedy."""
    for decoding, temperature in TEMPERATURES.items():
        evaluate(out / f"{name}, {decoding}", [*arguments, "--evaluation.temperature", str(temperature)])


def evaluate(folder: Path, arguments: Sequence[str]) -> None:
    if not (folder / "results.json").is_file():
        command("evaluate", folder, arguments)


def command(program: str, folder: Path, arguments: Sequence[str], changes: Sequence[str] = ()) -> None:
    """Run a program, or resume it if the folder contains a run of it."""
    arguments = ["--resume"] if (folder / "run.json").is_file() else arguments
    words = [*arguments, "--out", str(folder), *changes]
    print(f"$ python launch/{program}.py", *words, flush=True)
    subprocess.run([sys.executable, str(REPOSITORY / "launch" / f"{program}.py"), *words], check=True)


def summary(out: Path, names: Iterable[str]) -> str:
    """Markdown: exact match on the test questions, also by hops, and the minutes of training."""
    head = ["run", "minutes", *(f"{name}{part}" for name in TEMPERATURES for part in ("", " 1", " 2", " 3"))]
    rows = []
    for name in names:
        scores = [score for decoding in TEMPERATURES for score in exact_matches(out / f"{name}, {decoding}")]
        rows.append([name, minutes(out / name), *(f"{score:.3f}" for score in scores)])
    return markdown(head, rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))


def trained(out: Path, variants: Iterable[str]) -> list[str]:
    """The tested runs of these variants in the folder."""
    suffix = ", greedy"
    folders = [file.parent for name in variants for file in sorted(out.glob(f"{name}, seed *{suffix}/results.json"))]
    return [folder.name.removesuffix(suffix) for folder in folders]


def exact_matches(folder: Path) -> list[float]:
    """Exact match of all questions, and of questions with one, two and three hops."""
    metrics = json.loads((folder / "results.json").read_text())["metrics"]
    return [metrics["exact_match"], *(metrics[f"exact_match/{hops}_hops"] for hops in (1, 2, 3))]


def minutes(folder: Path) -> str:
    if not (folder / METRICS_FILE).is_file():
        return ""
    phases = [value for step in read_metrics(folder / METRICS_FILE) for name, value in step.items() if "time/" in name]
    return f"{sum(phases) / 60:.1f}"


def draw_learning(out: Path, variants: Mapping[str, Variant]) -> Figure:
    """Plots exact match of sampled trajectories, in total and by hops: a line per variant, thin lines for its seeds."""
    figure = Figure(figsize=(14, 3.7), layout="constrained", facecolor="white")
    panels = {"All questions": "exact_match"} | {
        f"{hops} hop{'s' * (hops > 1)}": f"exact_match/{hops}_hops" for hops in (1, 2, 3)
    }
    for axes, (title, metric) in zip(figure.subplots(1, 4, sharey=True), panels.items(), strict=True):
        for color, (variant, one) in zip(COLORS, variants.items(), strict=False):
            curves = [curve(out / name, metric) for name in trained(out, [variant])]
            draw_curves(axes, curves, color, one.label)
        style(axes, title, "step")
    figure.axes[0].set_ylim(0, 1)
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(variants), frameon=False, fontsize=9)
    return figure


def curve(folder: Path, metric: str) -> np.ndarray:
    """float64 [steps], a running mean over eight of them."""
    return running_mean(np.array([step.get(metric, np.nan) for step in read_metrics(folder / METRICS_FILE)]), 8)


def draw_curves(axes: Axes, curves: Sequence[np.ndarray], color: str, label: str) -> None:
    for values in curves:
        axes.plot(values, color=color, linewidth=0.8, alpha=0.4)
    if curves:
        shortest = min(map(len, curves))
        axes.plot(np.mean([values[:shortest] for values in curves], axis=0), color=color, linewidth=2, label=label)


def draw_tokens(out: Path) -> Figure:
    """Plots context tokens by turn, for trajectories with many turns; the legend shows their slopes."""
    figure = Figure(figsize=(6, 3.8), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for color, variant in zip(COLORS, CONTEXT_TOKENS, strict=False):
        for folder in sorted(out.glob(f"{variant}, seed *, long/results.json"))[:1]:
            lengths = search_turns(read_run(folder.parent, max_trajectories=1_000_000).summaries)
            turns = by_turn(lengths)
            label = f"{VARIANTS[variant].label}: {slope(lengths):+.1%} a turn"
            axes.plot(list(turns), list(turns.values()), color=color, marker="o", label=label)
    style(axes, "Tokens in context when a turn ends", "turn")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9)
    return figure


def search_turns(summaries: Iterable[TrajectorySummary]) -> list[np.ndarray]:
    """The context tokens of each trajectory by turn, without the answering turn, which reads nothing."""
    return [np.array(s.context_lengths[: -1 if s.stop is StopReason.ANSWERED else None], float) for s in summaries]


def by_turn(lengths: Sequence[np.ndarray]) -> dict[int, float]:
    """Mean context tokens of each turn that at least MIN_TRAJECTORIES trajectories reached."""
    turns = enumerate(zip_longest(*lengths), start=1)
    reached = {turn: [value for value in values if value is not None] for turn, values in turns}
    return {turn: statistics.fmean(values) for turn, values in reached.items() if len(values) >= MIN_TRAJECTORIES}


def slope(lengths: Sequence[np.ndarray]) -> float:
    """Growth of context tokens per turn from the second turn on, relative to their mean.

    Least squares with an intercept per trajectory, because long questions have more turns and more tokens per turn.
    """
    late = [tokens_T[1:8] for tokens_T in lengths if len(tokens_T) > 2]
    turn = np.concatenate([np.arange(len(tokens_T)) - (len(tokens_T) - 1) / 2 for tokens_T in late])
    tokens = np.concatenate([tokens_T - tokens_T.mean() for tokens_T in late])
    return float(turn @ tokens / (turn @ turn) / np.concatenate(late).mean())


def style(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(below)
    axes.grid(axis="y", color="#E3E3E3")
    axes.spines[["top", "right", "left"]].set_visible(False)


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
