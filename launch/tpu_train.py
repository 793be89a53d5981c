"""Trains a search agent by multi-context GRPO.

python launch/tpu_train.py --config tiny                                  # on a laptop, no download
python launch/tpu_train.py --config qwen7b --model.path DIR --data.train FILES --retrieval.corpus FILE
python launch/tpu_train.py --resume --out runs/NAME                       # go on after a stop
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import cli
import host
import tyro
import workplace

from memsearcher_jax.config import differences
from memsearcher_jax.report.progress import Progress, format_numbers
from memsearcher_jax.rl.run_folder import checkpoints_of, open_run_folder, read_run_config, with_own_tokenizer

if TYPE_CHECKING:
    from memsearcher_jax.rl.bucket import Bucket

SHOWN = 1_000  # trajectories that the report written at the end holds; launch/report.py writes larger ones


@dataclass(frozen=True)
class Train(cli.Command):
    """Train a search agent by multi-context GRPO. --out may also be a folder of a bucket, gs://BUCKET/FOLDER."""

    start_or_resume: bool = False
    """Start the run, or go on with it if --out holds it already: for a command that is repeated after every stop."""
    profile: Annotated[int | None, tyro.conf.arg(metavar="STEP")] = None
    """Write a trace of this step, counted from 0, to the folder profile/ of the run: xprof --logdir RUN/profile."""


def main(argv: Sequence[str], display: type[Progress] = Progress) -> None:
    """`display` shows how far the run is, and may watch it."""
    with contextlib.ExitStack() as scratch:
        with cli.one_line_errors():
            argv, bucket = workplace.settle(argv, scratch)
        train(argv, bucket, display)


def train(argv: Sequence[str], bucket: Bucket | None, display: type[Progress]) -> None:
    """Trains in the folder that `argv` names, a part of the bucket if there is one."""
    with contextlib.ExitStack() as job:
        with cli.one_line_errors(), contextlib.ExitStack() as starting:
            flags = cli.parse(Train, argv)
            config, out = flags.run, flags.out
            if bucket and config.rl.method == "demonstrations":
                raise ValueError(
                    f"--out {bucket.address}: rl.method demonstrations writes to a disk alone: name a folder"
                )
            if flags.profile is not None and config.rl.method == "demonstrations":
                raise ValueError("--profile: rl.method demonstrations has no trace of its steps: leave it out")
            if not flags.resume:
                out = starting.enter_context(cli.new_folder(out, Path(flags.config).stem))
            place = bucket.address if bucket else out
            hosts = job.enter_context(host.joined(stops=config.rl.method == "grpo"))
            if hosts.count > 1 and flags.out is None:
                raise ValueError(f"--out is missing: name the one folder that all {hosts.count} hosts write to")
            if bucket and flags.resume and hosts.first:
                bucket.fetch()  # what it adds to, and reports on at the end

            # JAX takes seconds to load; --help and a wrong flag are answered without it.
            from memsearcher_jax.report.metrics import FILE_NAME, MetricsWriter, read_metrics
            from memsearcher_jax.rl import build, loop, start, warmstart
            from memsearcher_jax.rl.bucket import SendingWriter
            from memsearcher_jax.rl.trace import Trace, check_step
            from memsearcher_jax.training import checkpoint

            done = checkpoint.latest_step(checkpoints_of(out)) if flags.resume else None
            if done is not None and done >= config.rl.steps:
                if hosts.first:
                    print(f"{place}: step {done} of {config.rl.steps} is done already; raise --rl.steps to go on")
                    cli.write_json(flags.json, {"run": str(place), "metrics": read_metrics(out / FILE_NAME)})
                return
            check_step(flags.profile, done or 0, config.rl.steps)
            settings = with_own_tokenizer(out, config) if flags.resume else config
            run = hosts.in_turn(lambda: build.prepare(settings, out))
            begin = start.resumed(run, out) if flags.resume else start.fresh(run)
            writer = None
            if hosts.first:
                cli.tell_skipped(run.problems)
                for name, then, now in differences(read_run_config(out), config) if flags.resume else ():
                    print(f"{place}: {name} was {then!r} and is {now!r} from now on", file=sys.stderr)
                open_run_folder(out, config, run.tokenizer.folder)
                first = begin.step if flags.resume else None
                if bucket:
                    bucket.send()
                writer = SendingWriter(bucket, resume_step=first) if bucket else MetricsWriter(out, resume_step=first)
                print(
                    f"{place}: {len(run.problems.train)} problems, step {begin.step} of {config.rl.steps}",
                    file=sys.stderr,
                )
        shown = display(host.label(hosts, "train"), config.rl.steps, done=begin.step)
        with ended_in_one_line(place), writer or contextlib.nullcontext(), shown as progress:
            if config.rl.method == "grpo":
                with Trace(out, flags.profile) as trace:
                    last = loop.train(run, begin, out, writer, progress, hosts, trace)
            else:
                last = warmstart.train(run, begin, out, writer, progress)
        if hosts.first:
            report(out)
            if bucket:
                with cli.one_line_errors():
                    bucket.send()
            cli.write_json(flags.json, {"run": str(place), "metrics": read_metrics(out / FILE_NAME)})
            print(f"{place}: step {config.rl.steps} done, {format_numbers(last)}; read {place}/report.html")


@contextlib.contextmanager
def ended_in_one_line(place: object) -> Iterator[None]:
    """Says why the run ended, and that it may go on: an alarm, or a disk that takes no more."""
    from memsearcher_jax.rl.alarms import RunEnded

    try:
        yield
    except BrokenPipeError:
        raise
    except (RunEnded, OSError) as end:
        line = " ".join(str(end).split())
        print(f"error: {line}; {place} keeps its checkpoints: mend that and --resume", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def report(out: Path) -> None:
    """The curves and the page of a run whose steps are done."""
    from memsearcher_jax.report.metrics import FILE_NAME
    from memsearcher_jax.report.page import write_page
    from memsearcher_jax.report.plots import training_curves

    training_curves(out / FILE_NAME, out / "curves.png")
    write_page(out, out / "report.html", cli.RULES, most=SHOWN)


if __name__ == "__main__":
    cli.run(main)
