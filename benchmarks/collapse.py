"""Rollback: trains `tiny` with a learning rate at which it collapses, with and without `health.on_collapse rollback`.

python benchmarks/collapse.py --out DIR [--seeds 0 1 2]

The runs are folders of DIR, and an interrupted benchmark continues where it stopped. A run without rollback ends
earlier: its last steps show whether it stays collapsed. The table is printed and written to DIR/collapse.md.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

import tyro
from learning import command, markdown

from memsearcher_jax.logs.metrics import METRICS_FILE, Metrics, read_metrics

COLLAPSING = [
    *("--config", "tiny", "--training.learning_rate", "9e-3"),  # 30 times that of the preset
    *("--rl.prompts_per_step", "4", "--sampling.slots", "32"),  # a quarter of the preset's, for short runs
    *("--rl.evaluate_every", "5", "--evaluation.max_questions", "100", "--rl.save_trajectories", "False"),
]
ROLLBACK = ["--health.on_collapse", "rollback", "--health.reward_window", "2", "--health.patience", "2"]
LAST = 5  # steps that the training columns are means of


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of this benchmark."""

    out: Path
    """Folder of all runs and of the table."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the runs; the data is the same."""
    guarded_steps: int = 40
    """Steps of the runs with rollback."""
    unguarded_steps: int = 20
    """Steps of the runs without."""


def main(flags: Flags) -> None:
    rows = []
    for seed in flags.seeds:
        for name, steps, arguments in (
            ("rollback", flags.guarded_steps, ROLLBACK),
            ("no rollback", flags.unguarded_steps, []),
        ):
            folder = flags.out / f"{name}, seed {seed}"
            words = [*COLLAPSING, *arguments, "--seed", str(seed)]
            command("tpu_train", folder, words, ["--rl.steps", str(steps)])
            rows.append([f"{name}, seed {seed}", *cells(read_metrics(folder / METRICS_FILE))])
            table = markdown(["run", "steps", "rollbacks", "last learning rate", "train EM", "test EM"], rows)
            (flags.out / "collapse.md").write_text(table, encoding="utf-8")
    print(table)


def cells(steps: list[Metrics]) -> list[str]:
    """Exact match on the training questions of the last steps, and on the test questions in the last evaluation."""
    test, rate = (
        [step[name] for step in steps if name in step][-1] for name in ("test/exact_match", "learning_rate")
    )  # a step in which all groups are constant has no update
    train = statistics.fmean(step["exact_match"] for step in steps[-LAST:])
    rollbacks = f"{steps[-1]['rollbacks']:.0f}" if "rollbacks" in steps[-1] else ""
    return [str(len(steps)), rollbacks, f"{rate:.1e}", f"{train:.3f}", f"{test:.3f}"]


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
