"""Evaluates a checkpoint: exact match, F1, cover exact match, turns, tokens per turn, and why trajectories ended.

python launch/evaluate.py --checkpoint runs/NAME                   # on the run's own test questions
python launch/evaluate.py --checkpoint DIR --data FILE             # on a JSONL file of questions
python launch/evaluate.py --resume --out runs/EVALUATION           # only the questions that are missing
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import cli
import tyro
from rich.console import Console

from memsearcher_jax.report.console import show_summary
from memsearcher_jax.report.progress import Progress
from memsearcher_jax.rl import build, score, source, start
from memsearcher_jax.rl.evaluate import evaluate


@dataclass(frozen=True)
class Evaluate(cli.Command):
    """Evaluate a checkpoint."""

    questions: Annotated[Path | None, tyro.conf.arg(name="data")] = None
    """JSONL file of questions; without it, the test questions of the config."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse(Evaluate, argv)
        config = cli.at_checkpoint(flags, needed=True)
        if flags.questions:
            config = replace(config, data=replace(config.data, train=(), test=(str(flags.questions),)))
        out = flags.out if flags.resume else cli.new_folder(flags.out, "evaluate")
        run = build.prepare(config, cli.workspace(flags, config, out))
        source.open_run_folder(out, config, run.tokenizer.folder)
        params = build.sampler_params(run, start.starting_params(run))
        driver = build.make_driver(run, evaluation=True)
    with Progress("evaluate", 1) as progress:
        done = evaluate(run, driver, params, progress.activity, out / "trajectories")
        summary = score.summarise(done)
        progress.advance(summary)
    show_summary(summary, Console())
    cli.write_json(out / "results.json", {"checkpoint": config.model.path, "questions": len(done), "metrics": summary})
    cli.write_json(flags.json, {"checkpoint": config.model.path, "questions": len(done), "metrics": summary})


if __name__ == "__main__":
    main(sys.argv[1:])
