"""What is learned: trains the small models with several seeds, variants and baselines, and tests them before and after.

python benchmarks/learning.py --out DIR [--variants tiny react ...] [--seeds 0 1 2]
python benchmarks/learning.py --out DIR --variants memalpha "memalpha pooled" "memalpha reader" "memalpha recent"

Without --variants it runs the ablations of MemSearcher. An interrupted benchmark continues where it stopped. Prints a
table, and writes it to DIR/learning.md: the score on all test problems and on its groups (questions by hops, streams by
chunks, documents by passages), tokens of all contexts of a trajectory, and of the longest context (mean and maximum),
sampled and greedy. launch/report.py draws the curves.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import tyro
from common import REPOSITORY

from memsearcher_jax.launch.sweep import start
from memsearcher_jax.logs.metrics import METRICS_FILE, Metrics, read_metrics
from memsearcher_jax.logs.run_facts import has_ended, read_results
from memsearcher_jax.logs.trajectories import read_trajectories


class Variant(NamedTuple):
    config: str
    arguments: str = ""
    trained: bool = True


# 30 times the learning rate of the preset, and a quarter of its problems.
COLLAPSING = "--training.learning_rate 9e-3 --rl.prompts_per_step 4 --sampling.slots 32 --rl.evaluate_every 5"
COLLAPSING += " --evaluation.max_questions 100"
VARIANTS = {
    "tiny": Variant("tiny"),
    "last context": Variant("tiny", "--rl.credit last_context"),
    "no memory": Variant("tiny", "--agent.carry_memory False"),
    "react": Variant("tiny_react"),
    "search_r1": Variant("tiny_search_r1"),
    "mem1": Variant("tiny_mem1"),
    "rag": Variant("tiny_rag"),
    "direct": Variant("tiny_direct"),
    "exact match": Variant("tiny", "--reward.metric exact_match"),
    "no format": Variant("tiny", "--reward.wrong_answer 0"),
    "lora": Variant("tiny", "--model.lora_rank 16 --training.learning_rate 1e-3"),
    "carry over 1": Variant("tiny", "--rl.carry_over 1"),
    "carry over 2": Variant("tiny", "--rl.carry_over 2"),
    "collapse": Variant("tiny", COLLAPSING),
    "rollback": Variant("tiny", f"{COLLAPSING} --health.on_collapse rollback --health.patience 2"),
    "memalpha": Variant("tiny_memalpha"),
    "memalpha pooled": Variant("tiny_memalpha", "--rl.advantage_scope pooled"),
    "memalpha reader": Variant("tiny_memalpha", "--memalpha.answer_from rag", trained=False),
    "memalpha recent": Variant("tiny_memalpha", "--memalpha.answer_from long_context", trained=False),
}
TEMPERATURES = {"sampled": "1", "greedy": "0"}


@dataclass(frozen=True, kw_only=True)
class Flags:
    out: Path
    """Folder of all runs and of the table."""
    variants: tuple[Literal[*VARIANTS], ...] = ("tiny", "last context", "no memory", "react")
    """Variants to train."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the training runs; the data is the same."""
    steps: int | None = None
    """Training steps, if not those of the preset."""


def main(flags: Flags) -> None:
    table: dict[str, list[str]] = {}
    for name in flags.variants:
        config, arguments, trained = VARIANTS[name]
        untrained = f"{config}, start" if trained else name
        if untrained not in table:
            words = ["--config", config]
            if not trained:
                words += arguments.split()
            table[untrained] = ["", *scores(flags.out / untrained, words)]
        for seed in flags.seeds if trained else ():
            run = flags.out / f"{name}, seed {seed}"
            steps = ["--rl.steps", str(flags.steps)] if flags.steps else []
            command("tpu_train", run, ["--config", config, *arguments.split(), "--seed", str(seed), *steps])
            minutes = f"{training_minutes(read_metrics(run / METRICS_FILE)):.1f}"
            table[run.name] = [minutes, *scores(run, ["--checkpoint", str(run)])]
    rows = ([name, *cells] for name, cells in table.items())
    write_table(flags.out / "learning.md", "run", "minutes", *TEMPERATURES, rows=rows)


def scores(run: Path, arguments: Sequence[str]) -> list[str]:
    """Tests the policy with both temperatures. Returns a cell for each, with the scores of all groups of problems."""
    cells = []
    for decoding, temperature in TEMPERATURES.items():
        folder = run.with_name(f"{run.name}, {decoding}")
        if not has_ended(folder):
            command("evaluate", folder, [*arguments, "--evaluation.temperature", temperature])
        results = read_results(folder)
        groups = {name: value for name, value in results["metrics"].items() if name.startswith("exact_match")}
        for name, group in (results["evaluation"]["benchmarks"] | results["evaluation"]["by_length"]).items():
            score = "cover_exact_match" if name.startswith("documents") else "accuracy"
            if score in group["scores"]:
                groups[name] = group["scores"][score]["mean"]
        cell = ", ".join(f"{name.removeprefix('exact_match/')} {value:.3f}" for name, value in groups.items())
        cells.append(f"{cell}; {tokens(folder)}")
    return cells


def tokens(evaluation: Path) -> str:
    """Tokens of all contexts of a trajectory, each counted once, and of its longest context: mean and maximum."""
    files = sorted((evaluation / "trajectories").rglob("*.jsonl.gz"))
    totals = []
    longest = []
    for file in files:
        for scored in read_trajectories(file):
            lengths = [len(context.ids) for context in scored.trajectory.contexts]
            if lengths:
                totals.append(sum(lengths))
                longest.append(max(lengths))
    mean_total = statistics.fmean(totals)
    mean_longest = statistics.fmean(longest)
    return f"{mean_total:.0f} tokens, longest context {mean_longest:.0f} to {max(longest)}"


def command(program: str, folder: Path, words: Sequence[str]) -> None:
    """Run a program of launch/, or resume it if the folder contains a run of it."""
    print(f"$ python launch/{program}.py", *words, "--out", folder, flush=True)
    start(str(REPOSITORY / "launch" / f"{program}.py"), folder, words, os.environ)


def write_table(file: Path, *header: str, rows: Iterable[Sequence[str]]) -> None:
    """Writes and prints a table in Markdown."""
    text = "".join(f"| {' | '.join(cells)} |\n" for cells in (header, ["---"] * len(header), *rows))
    file.write_text(text, encoding="utf-8")
    print(text)


def training_minutes(steps: Sequence[Metrics]) -> float:
    """Without what evaluates the policy."""
    phases = [phase for step in steps for phase in step.items() if phase[0].startswith("time/")]
    return sum(seconds for name, seconds in phases if name != "time/evaluate") / 60


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
