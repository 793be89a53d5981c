"""Reward, a teacher, or one's own best trajectories: greedy exact match on the questions of `tiny` by sampled tokens.

python benchmarks/teaching.py --out DIR [--students tiny half] [--seeds 0 1 2]

A student begins where `tiny` does, or has half its width and the same demonstrations; the teacher is a trained `tiny`.
"best of n" samples 640 trajectories and imitates the best of each problem so far, from the start again, several times.
An interrupted benchmark continues where it stopped. Writes DIR/teaching.md, a row for each student and method with a
number for each seed, and DIR/teaching.png.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

import tyro
from common import REPOSITORY
from learning import command, training_minutes, write_table
from matplotlib.figure import Figure

from memsearcher_jax.logs.metrics import METRICS_FILE, read_metrics
from memsearcher_jax.logs.run_facts import has_ended, read_results
from memsearcher_jax.report.plots import COLORS, save_png, style_axes

REACHED = 0.8
TAUGHT = "--rl.keep_constant_reward_groups True --training.objective"
METHODS = {
    "grpo": "",
    "distill": f"{TAUGHT} distill",
    "grpo+distill": f"{TAUGHT} grpo+distill --teacher.on wrong",
    "best of n": "",
}
BEST = (
    "--sft.keep best --sft.min_reward 0.5 --sft.held_out_share 0 --sft.trajectories_per_step 32 --sft.epochs 4 "
    "--training.learning_rate 1e-3"
)
HALF = "--model.embed_size 64 --model.ffn_size 160 --model.head_size 16"


class Student(NamedTuple):
    sizes: str
    steps: int
    every: int  # steps between evaluations
    rounds: int


STUDENTS = {"tiny": Student("", 12, 2, 1), "half": Student(HALF, 80, 4, 2)}


class Point(NamedTuple):
    """After a step or a round: what was sampled and computed until then, and the score on 300 questions."""

    step: int
    tokens: float  # thousands
    minutes: float
    exact_match: float


@dataclass(frozen=True, kw_only=True)
class Flags:
    out: Path
    """Folder of all runs, of the table and of the plot."""
    students: tuple[Literal["tiny", "half"], ...] = ("tiny", "half")
    """Students to train."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the runs; the data is the same."""


def main(flags: Flags) -> None:
    out = flags.out.resolve()  # one command below runs in another folder
    if not has_ended(out / "teacher"):
        command("tpu_train", out / "teacher", ["--config", "tiny"])
    curves: dict[tuple[str, str], list[list[Point]]] = {}
    for name, method, seed in product(flags.students, METHODS, flags.seeds):
        student = STUDENTS[name]
        start = half_start(out) if name == "half" else "package:tiny"
        words = ["--config", "tiny", *student.sizes.split()]
        run = out / f"{name}, {method}, seed {seed}"
        if method == "best of n":
            points = best_of_n(run, student.rounds, words, start, seed)
        else:
            taught = ["--teacher.path", str(out / "teacher")] if METHODS[method] else []
            words += ["--model.path", start, "--seed", str(seed), *METHODS[method].split(), *taught]
            points = trained(run, student, words)
        curves.setdefault((name, method), []).append(list(points))
    columns = f"stays at {REACHED} from step or round", "thousand tokens", "minutes", "last three"
    rows = ([*names, *row(seeds)] for names, seeds in curves.items())
    write_table(out / "teaching.md", "student", "method", *columns, rows=rows)
    plot(out / "teaching.png", flags.students, curves)


def half_start(out: Path) -> str:
    """The student of half the width after the warm start of `tiny`."""
    demos = out / "demos"
    run = out / "half, warm start"
    if not has_ended(run):
        script = ["-m", "examples.warmstart.demonstrate", "--config", "tiny_warmstart", "--steps", "250"]
        subprocess.run([sys.executable, *script, "--out", str(demos)], cwd=REPOSITORY, check=True)
        words = ["--config", "tiny_warmstart", *HALF.split(), "--training.decay_steps", "2600 updates"]
        files = ["--sft.trajectories", str(demos), "--sft.held_out", str(demos / "held_out")]
        command("sft", run, [*words, *files])
    return str(run)


def trained(run: Path, student: Student, words: Sequence[str]) -> Iterator[Point]:
    steps = ["--rl.steps", str(student.steps), "--rl.evaluate_every", str(student.every)]
    if not has_ended(run):
        command("tpu_train", run, [*words, *steps])
    tokens = minutes = 0.0
    for step, metrics in enumerate(read_metrics(run / METRICS_FILE), start=1):
        tokens += metrics["generated_tokens"] / 1e3
        minutes += training_minutes([metrics])
        if "test/exact_match" in metrics:
            yield Point(step, tokens, minutes, metrics["test/exact_match"])


def best_of_n(run: Path, rounds: int, words: Sequence[str], start: str, seed: int) -> Iterator[Point]:
    """Rounds: the policy samples, at a learning rate that does not change it; the start imitates the best of all."""
    policy = start
    tokens = 0.0
    minutes = 0.0
    files = list[str]()
    for number in range(1, rounds + 1):
        sampled = run.with_name(f"{run.name}, sampled {number}")
        learned = run.with_name(f"{run.name}, learned {number}")
        tested = run.with_name(f"{run.name}, tested {number}")
        files.append(str(sampled))
        if not has_ended(tested):
            sampling = ["--seed", str(seed + 10 * number), "--rl.steps", "5", "--training.learning_rate", "1e-12"]
            command("tpu_train", sampled, [*words, "--model.path", policy, *sampling])
            learning = ["--seed", str(seed), "--sft.trajectories", *files, *BEST.split()]
            command("sft", learned, [*words, "--model.path", start, *learning])
            command("evaluate", tested, [*words, "--checkpoint", str(learned)])
        policy = str(learned)
        steps = read_metrics(sampled / METRICS_FILE)
        tokens += sum(metrics["generated_tokens"] for metrics in steps) / 1e3
        minutes += sum(metrics["time/rollout"] for metrics in steps) / 60
        minutes += training_minutes(read_metrics(learned / METRICS_FILE))
        yield Point(number, tokens, minutes, read_results(tested)["metrics"]["exact_match"])


def row(seeds: list[list[Point]]) -> Iterator[str]:
    """Cells of a table, with a number for each seed: the point from which the score stays at REACHED, then scores."""
    first = []
    for points in seeds:
        below = max((number for number, point in enumerate(points) if point.exact_match < REACHED), default=-1)
        first.append(points[below + 1] if below + 1 < len(points) else None)
    for cell in ("{0.step}", "{0.tokens:.0f}", "{0.minutes:.1f}"):
        yield " ".join(cell.format(point) if point else "-" for point in first)
    yield " ".join(f"{fmean(point.exact_match for point in points[-3:]):.2f}" for points in seeds)


def plot(path: Path, students: tuple[str, ...], curves: dict[tuple[str, str], list[list[Point]]]) -> None:
    figure = Figure((9, 3.4), layout="constrained")
    for number, student in enumerate(students, start=1):
        axes = figure.add_subplot(1, len(students), number)
        for color, method in zip(COLORS, METHODS, strict=False):
            for seed, points in enumerate(curves[student, method]):
                x, y = zip(*((point.tokens, point.exact_match) for point in points), strict=True)
                axes.plot(x, y, ".-", color=color, linewidth=1, label="" if seed else method)
        style_axes(axes, "thousand sampled tokens", 0.6)
        axes.set_title(f"Greedy exact match, {student}", loc="left", fontsize=10)
        axes.legend(frameon=False, fontsize=8)
    save_png(figure, path)


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
