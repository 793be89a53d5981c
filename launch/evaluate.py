"""Evaluates a checkpoint: exact match, F1, cover exact match, turns, tokens per turn, and why trajectories ended.

python launch/evaluate.py --checkpoint runs/NAME                   # on the run's own test questions
python launch/evaluate.py --checkpoint DIR --data FILE             # on a JSONL file of questions
python launch/evaluate.py --resume --out runs/EVALUATION           # only the questions that are missing
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import cli
import tyro
from rich.console import Console

from memsearcher_jax.config import differences
from memsearcher_jax.jsonl import parse_object
from memsearcher_jax.report.console import show_summary
from memsearcher_jax.report.progress import Progress
from memsearcher_jax.rl.run_folder import open_run_folder, read_run_config, with_own_tokenizer

WEIGHTS_FILE = "weights.json"  # which weights an evaluation is about; a run that trains on has others later


@dataclass(frozen=True)
class Evaluate(cli.Command):
    """Evaluate a checkpoint: exact match, F1, cover exact match, turns, tokens per turn."""

    data: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """JSONL file of questions (id, question, golden_answers); without it, the test questions of the settings."""

    def adjusted(self) -> Evaluate:
        if self.data is None:
            return self
        return replace(self, run=replace(self.run, data=replace(self.run.data, train=(), test=(str(self.data),))))


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors(), contextlib.ExitStack() as starting:
        flags = cli.parse(Evaluate, argv)
        config, out = flags.run, flags.out
        if flags.resume:
            refuse_changes(flags)
        cli.need_weights(flags)
        if not flags.resume:
            out = starting.enter_context(cli.new_folder(out, "evaluate"))

        # JAX takes seconds to load; --help and a wrong flag are answered without it.
        from memsearcher_jax.rl import build, score, source, start
        from memsearcher_jax.rl.evaluate import evaluate, questions_of

        weights = {"checkpoint": config.model.path, "step": source.newest_step(config.model.path)}
        if flags.resume:
            refuse_other_weights(out, weights)
        run = build.prepare(
            with_own_tokenizer(out, config) if flags.resume else config,
            out,
            training=False,
            index=cli.standing_index(flags.run),
        )
        cli.tell_skipped(run.problems)
        params = build.sampler_params(run, start.starting_params(run))
        driver = build.make_driver(run, evaluation=True)
        cli.write_json(out / WEIGHTS_FILE, weights)
        open_run_folder(out, config, run.tokenizer.folder)
    with Progress("evaluate", len(questions_of(run))) as progress:
        done = evaluate(
            run,
            driver,
            params,
            progress.activity,
            folder=out / "trajectories",
            ended=lambda part, done: progress.advance(score.summarise(done), by=len(part)),
        )
    summary = score.summarise(done)
    show_summary(summary, Console())
    result = weights | {"questions": len(done), "metrics": summary}
    cli.write_json(out / "results.json", result)
    cli.write_json(flags.json, result)
    print(f"{out}: {len(done)} questions answered by {config.model.path}; numbers in {out / 'results.json'}")


def refuse_changes(flags: Evaluate) -> None:
    """An evaluation under two kinds of settings would be about neither."""
    if not (flags.out / WEIGHTS_FILE).is_file():
        raise FileNotFoundError(f"{flags.out} holds no evaluation: there is no {WEIGHTS_FILE} in it")
    for name, then, now in differences(read_run_config(flags.out), flags.run):
        raise ValueError(
            f"{name} was {then!r} when {flags.out} was started and cannot become {now!r}: start another evaluation"
        )


def refuse_other_weights(out: Path, weights: dict) -> None:
    """Raises ValueError if the checkpoint has moved on since the evaluation in `out` was started."""
    file = out / WEIGHTS_FILE
    stored = parse_object(str(file), file.read_bytes())
    if stored != weights:
        raise ValueError(
            f"{out} evaluates step {stored.get('step')} of {stored.get('checkpoint')}, whose newest checkpoint is step "
            f"{weights['step']} now: start another evaluation"
        )


if __name__ == "__main__":
    cli.run(main)
