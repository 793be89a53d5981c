"""Memory against compaction: an agent trained with five limits of its history, and with its summaries masked.

python benchmarks/compaction.py --out DIR [--seeds 0 1 2] [--variants "history 0" ...]

All variants are the agent `compact` from the same weights, trained on equally many trajectories of questions of 1 to 3
hops, with updates of about equally many trajectories, and tested greedily on 50 questions of each of 1 to 7 hops. An
interrupted benchmark continues where it stopped. After every run it writes DIR/compaction.json, what was measured;
DIR/compaction.md, a row for each variant; and DIR/compaction.png, the limits by hops.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np
import tyro
from learning import command, training_minutes, write_table
from matplotlib.figure import Figure

from memsearcher_jax.logs.metrics import METRICS_FILE, read_metrics
from memsearcher_jax.logs.run_facts import has_ended
from memsearcher_jax.logs.trajectories import read_trajectories
from memsearcher_jax.report.plots import COLORS, GREY, save_png, style_axes
from memsearcher_jax.types import ScoredTrajectory

HOPS = range(1, 8)
TRAINED, HELD_OUT = range(1, 4), range(4, 8)
COLUMNS = {"1 to 3": TRAINED, "3": range(3, 4), "4": range(4, 5), "4 to 7": HELD_OUT}
"""Columns of exact match: the hops of their questions."""
NEVER = 1_000  # tokens of history, more than those of 8 turns


@dataclass(frozen=True)
class Variant:
    history_tokens: int
    minibatch_contexts: int  # those of about 17 trajectories
    arguments: str = ""


# A turn with its search adds about 66 tokens: these limits are crossed in turn 1, 2, 3, 4 and never.
VARIANTS = {
    "history 0": Variant(0, 50),
    "history 96": Variant(96, 28),
    "history 176": Variant(176, 22),
    "history 256": Variant(256, 18),
    "no limit": Variant(NEVER, 17),
    "history 0, actions": Variant(0, 50, "--training.train_on actions"),
    "history 96, actions": Variant(96, 28, "--training.train_on actions"),
}
LIMITS = [name for name, variant in VARIANTS.items() if not variant.arguments]


@dataclass(frozen=True)
class Measured:
    """What a policy does on the test questions. The numbers by hops, whose keys are text as in JSON, are means.

    The seed of a policy that is not trained is -1.
    """

    variant: str
    seed: int
    exact_match: dict[str, float]
    generated: dict[str, float]  # tokens of a question
    processed: dict[str, float]  # tokens of all contexts of a question, each counted once
    longest: dict[str, float]  # tokens of the longest context of a question
    longest_of_all: int  # the maximum over all questions
    memory_tokens: float  # of the last summary, over the questions that have one
    stops: dict[str, float]  # share of all questions, by the reason why the trajectory ended
    training_minutes: float  # without the test
    sampled_thousands: float  # tokens that were sampled in training


@dataclass(frozen=True, kw_only=True)
class Flags:
    out: Path
    """Folder of all runs, of the tables and of the plot."""
    variants: tuple[Literal[*VARIANTS], ...] = tuple(VARIANTS)
    """Variants to train."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the runs; the data is the same."""
    steps: int = 12
    """Training steps of 128 trajectories."""


def main(flags: Flags) -> None:
    measured = list[Measured]()
    for name in flags.variants:
        if name in LIMITS:
            tested = flags.out / f"{name}, start"
            test(tested, settings(name))
            measured.append(measure(name, -1, tested))
    for seed in flags.seeds:
        for name in flags.variants:
            run = flags.out / f"{name}, seed {seed}"
            if not has_ended(run):
                words = [*settings(name), "--rl.steps", str(flags.steps), "--rl.evaluate_every", "0"]
                command("tpu_train", run, [*words, "--seed", str(seed)])
            tested = run.with_name(f"{run.name}, test")
            test(tested, ["--checkpoint", str(run)])
            measured.append(measure(name, seed, tested, run))
            write(flags.out, measured)


def settings(name: str) -> list[str]:
    """The words of a variant, which `tpu_train.py` and `evaluate.py` take."""
    variant = VARIANTS[name]
    words = ["--config", "tiny_compact", "--agent.history_tokens", str(variant.history_tokens)]
    words += ["--training.minibatch_contexts", str(variant.minibatch_contexts)]
    if variant.history_tokens == NEVER:
        words += ["--sampling.context_tokens", "1024", "--training.seq_len", "1024", "--training.minibatch_rows", "8"]
    return words + variant.arguments.split()


def test(folder: Path, words: Sequence[str]) -> None:
    """Tests a policy on questions of all numbers of hops."""
    if not has_ended(folder):
        questions = ["--data.encyclopedia.hops", *map(str, HOPS), "--data.encyclopedia.test_questions", "350"]
        command("evaluate", folder, [*words, *questions, "--agent.question_tokens", "48"])


def measure(name: str, seed: int, tested: Path, run: Path | None = None) -> Measured:
    """What the evaluation in `tested` shows of a policy, which `run` trained."""
    files = sorted((tested / "trajectories").rglob("*.jsonl.gz"))
    scored = [trajectory for file in files for trajectory in read_trajectories(file)]
    by_hops = {str(hops): [trajectory for trajectory in scored if hops_of(trajectory) == hops] for hops in HOPS}

    def means(number: Callable[[ScoredTrajectory], float]) -> dict[str, float]:
        return {hops: fmean(map(number, members)) for hops, members in by_hops.items()}

    outcomes = [trajectory.trajectory.outcome for trajectory in scored]
    stops = Counter(outcome.stop.value for outcome in outcomes)
    summaries = [outcome.counts["memory_tokens"] for outcome in outcomes if outcome.counts.get("compactions")]
    steps = read_metrics(run / METRICS_FILE) if run else []
    return Measured(
        variant=name,
        seed=seed,
        exact_match=means(lambda trajectory: trajectory.scores["exact_match"]),
        generated=means(generated_tokens),
        processed=means(lambda trajectory: sum(context_lengths(trajectory))),
        longest=means(lambda trajectory: max(context_lengths(trajectory))),
        longest_of_all=max(max(context_lengths(trajectory)) for trajectory in scored),
        memory_tokens=fmean(summaries) if summaries else 0.0,
        stops={stop: count / len(scored) for stop, count in stops.items()},
        training_minutes=training_minutes(steps),
        sampled_thousands=sum(step["generated_tokens"] for step in steps) / 1e3,
    )


def hops_of(scored: ScoredTrajectory) -> int:
    return len(scored.trajectory.problem.metadata["relations"])


def generated_tokens(scored: ScoredTrajectory) -> int:
    return sum(int(context.sampled.sum()) for context in scored.trajectory.contexts)


def context_lengths(scored: ScoredTrajectory) -> list[int]:
    return [len(context.ids) for context in scored.trajectory.contexts]


def write(out: Path, measured: Sequence[Measured]) -> None:
    """The files of what has been measured so far."""
    lines = json.dumps([asdict(policy) for policy in measured], indent=1)
    (out / "compaction.json").write_text(lines + "\n", encoding="utf-8")
    header = [f"exact match, {hops} hops" for hops in COLUMNS]
    header += ["generated, 1 to 3", "processed, 1 to 3", "processed, 4 to 7", "longest context, 4 to 7", "longest"]
    header += ["summary", "bad or cut off", "thousand tokens sampled", "minutes"]
    write_table(out / "compaction.md", "", *header, rows=table(measured))
    plot(out / "compaction.png", measured)


def table(measured: Sequence[Measured]) -> Iterator[list[str]]:
    """A row for each variant before training, and one for it after, with means and ranges of the seeds."""
    for name in dict.fromkeys(policy.variant for policy in measured):
        of_variant = [policy for policy in measured if policy.variant == name]
        start = [policy for policy in of_variant if policy.seed < 0]
        trained = [policy for policy in of_variant if policy.seed >= 0]
        for label, policies in ((f"{name}, start", start), (name, trained)):
            if policies:
                yield [label, *cells(policies)]


def cells(policies: Sequence[Measured]) -> Iterator[str]:
    """One row: a variant's policies, one for each seed."""
    for hops in COLUMNS.values():
        yield share([mean_over(policy.exact_match, hops) for policy in policies])
    yield count([mean_over(policy.generated, TRAINED) for policy in policies])
    yield count([mean_over(policy.processed, TRAINED) for policy in policies])
    yield count([mean_over(policy.processed, HELD_OUT) for policy in policies])
    yield count([mean_over(policy.longest, HELD_OUT) for policy in policies])
    yield str(max(policy.longest_of_all for policy in policies))
    yield count([policy.memory_tokens for policy in policies])
    yield share([policy.stops.get("bad_memory", 0) + policy.stops.get("cut_off", 0) for policy in policies])
    yield count([policy.sampled_thousands for policy in policies])
    yield f"{min(policy.training_minutes for policy in policies):.1f}"


def mean_over(by_hops: dict[str, float], hops: range) -> float:
    """The mean over questions of these hops: there are equally many of each."""
    return fmean(by_hops[str(number)] for number in hops)


def share(numbers: Sequence[float]) -> str:
    """The mean, and the range of several."""
    return _with_range([f"{number:.2f}".removeprefix("0") for number in (fmean(numbers), min(numbers), max(numbers))])


def count(numbers: Sequence[float]) -> str:
    """The mean, and the range of several."""
    return _with_range([f"{number:,.0f}" for number in (fmean(numbers), min(numbers), max(numbers))])


def _with_range(texts: Sequence[str]) -> str:
    mean, low, high = texts
    return mean if low == high else f"{mean} ({low} to {high})"


def plot(path: Path, measured: Sequence[Measured]) -> None:
    """Exact match and processed tokens of the limits by hops: the mean of the seeds, and their range."""
    figure = Figure((9, 3.4), layout="constrained")
    panels = {"Greedy exact match": "exact_match", "Tokens processed per question": "processed"}
    for number, (title, field) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, len(panels), number)
        for color, name in zip(COLORS, LIMITS, strict=False):
            trained = [policy for policy in measured if policy.variant == name and policy.seed >= 0]
            if trained:
                values = np.array([[getattr(policy, field)[str(hops)] for hops in HOPS] for policy in trained])
                axes.plot(HOPS, values.mean(axis=0), ".-", color=color, linewidth=1.2, label=name)
                axes.fill_between(HOPS, values.min(axis=0), values.max(axis=0), color=color, alpha=0.12, linewidth=0)
        axes.axvline(TRAINED.stop - 0.5, color=GREY, linewidth=0.8, linestyle=":")
        style_axes(axes, "hops of the question; those after the dotted line were not trained", 0.0)
        axes.set_xticks(list(HOPS))
        axes.set_title(title, loc="left", fontsize=10)
        axes.legend(frameon=False, fontsize=8)
    save_png(figure, path)


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
