"""Trains a search agent by multi-context GRPO.

python launch/tpu_train.py --config tiny                                  # on a laptop, no download
python launch/tpu_train.py --config qwen7b --model.path DIR --data.train FILES --retrieval.corpus FILE
python launch/tpu_train.py --resume --out runs/NAME                       # go on after a stop
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cli

from memsearcher_jax.report.metrics import MetricsWriter, read_metrics
from memsearcher_jax.report.plots import training_curves
from memsearcher_jax.report.progress import Progress, format_numbers
from memsearcher_jax.rl import build, source, start
from memsearcher_jax.rl.loop import train


@dataclass(frozen=True)
class Train(cli.Command):
    """Train a search agent by multi-context GRPO."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse(Train, argv)
        config = cli.at_checkpoint(flags)
        out = flags.out if flags.resume else cli.new_folder(flags.out, Path(flags.config).stem)
        run = build.prepare(config, out)
        source.open_run_folder(out, config, run.tokenizer.folder)
        begin = start.resumed(run, out) if flags.resume else start.fresh(run)
        writer = MetricsWriter(out, resume_step=begin.step if flags.resume else None)
    print(f"{out}: {len(run.problems.train)} problems, step {begin.step} of {config.rl.steps}", file=sys.stderr)
    with writer, Progress("train", config.rl.steps, done=begin.step) as progress:
        last = train(run, begin, out, writer, progress)
    training_curves(out / "metrics.jsonl", out / "curves.png")
    cli.write_json(flags.json, {"run": str(out), "metrics": read_metrics(out / "metrics.jsonl")})
    print(f"{out}: step {config.rl.steps} done, {format_numbers(last)}; curves in {out / 'curves.png'}")


if __name__ == "__main__":
    main(sys.argv[1:])
