"""Trains a search agent by multi-context GRPO.

python launch/tpu_train.py --config tiny                                  # on a laptop, no download
python launch/tpu_train.py --config qwen7b --model.path DIR --data.train FILES --retrieval.corpus FILE
python launch/tpu_train.py --resume --out runs/NAME                       # go on after a stop
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cli

from memsearcher_jax.config import differences
from memsearcher_jax.report.progress import Progress, format_numbers
from memsearcher_jax.rl.run_folder import checkpoints_of, open_run_folder, read_run_config, with_own_tokenizer

SHOWN = 1_000  # trajectories that the report written at the end holds; launch/report.py writes larger ones


@dataclass(frozen=True)
class Train(cli.Command):
    """Train a search agent by multi-context GRPO."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors(), contextlib.ExitStack() as starting:
        flags = cli.parse(Train, argv)
        config, out = flags.run, flags.out
        if not flags.resume:
            out = starting.enter_context(cli.new_folder(out, Path(flags.config).stem))

        # JAX takes seconds to load; --help and a wrong flag are answered without it.
        from memsearcher_jax.report.metrics import FILE_NAME, MetricsWriter, read_metrics
        from memsearcher_jax.report.page import write_page
        from memsearcher_jax.report.plots import training_curves
        from memsearcher_jax.rl import build, loop, start, warmstart
        from memsearcher_jax.training import checkpoint

        done = checkpoint.latest_step(checkpoints_of(out)) if flags.resume else None
        if done is not None and done >= config.rl.steps:
            print(f"{out}: step {done} of {config.rl.steps} is done already; raise --rl.steps to go on")
            cli.write_json(flags.json, {"run": str(out), "metrics": read_metrics(out / FILE_NAME)})
            return
        run = build.prepare(with_own_tokenizer(out, config) if flags.resume else config, out)
        cli.tell_skipped(run.problems)
        begin = start.resumed(run, out) if flags.resume else start.fresh(run)
        for name, then, now in differences(read_run_config(out), config) if flags.resume else ():
            print(f"{out}: {name} was {then!r} and is {now!r} from now on", file=sys.stderr)
        open_run_folder(out, config, run.tokenizer.folder)
        writer = MetricsWriter(out, resume_step=begin.step if flags.resume else None)
    print(f"{out}: {len(run.problems.train)} problems, step {begin.step} of {config.rl.steps}", file=sys.stderr)
    train = {"grpo": loop.train, "demonstrations": warmstart.train}[config.rl.method]
    with writer, Progress("train", config.rl.steps, done=begin.step) as progress:
        last = train(run, begin, out, writer, progress)
    training_curves(out / FILE_NAME, out / "curves.png")
    write_page(out, out / "report.html", cli.RULES, most=SHOWN)
    cli.write_json(flags.json, {"run": str(out), "metrics": read_metrics(out / FILE_NAME)})
    print(f"{out}: step {config.rl.steps} done, {format_numbers(last)}; read {out / 'report.html'}")


if __name__ == "__main__":
    cli.run(main)
