"""Trains a search agent by multi-context GRPO.

python launch/tpu_train.py --config tiny                                  # on a laptop, no download
python launch/tpu_train.py --config qwen7b --model.path DIR --data.train FILES \\
    --retrieval.corpus FILE --retrieval.encoder DIR
python launch/tpu_train.py --resume --out runs/NAME                       # continue after a stop
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from memsearcher_jax.config import differences, to_dict
from memsearcher_jax.launch import cli, outputs, remote_output
from memsearcher_jax.launch.report import has_ended
from memsearcher_jax.logs import trackers
from memsearcher_jax.logs.metric_names import MetricName
from memsearcher_jax.logs.metrics import METRICS_FILE, MetricsWriter, read_metrics
from memsearcher_jax.logs.progress import Progress, format_metrics
from memsearcher_jax.report.page.html import write_page
from memsearcher_jax.report.plots import CURVES_FILE, training_curves
from memsearcher_jax.report.statistics import bootstrap_mean
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.runtime import preemption
from memsearcher_jax.runtime.card import add_results, write_card
from memsearcher_jax.runtime.remote_dir import RemoteDir, UploadingWriter
from memsearcher_jax.runtime.run_dir import INDEX, checkpoints_of, open_run_folder, read_run_config, with_own_tokenizer

LAST_STEPS = 10  # over which the results on the card of a run are means
RESTART_SECONDS = 120.0  # in which the processes of the previous attempt of a job must end
REPORT_TRAJECTORIES = 1_000  # in the report written at the end; launch/report.py writes larger ones


@dataclass(frozen=True)
class Train(cli.Command, remote_output.TrainSource):
    """Train a search agent by multi-context GRPO. --out may also be a directory of a bucket, gs://BUCKET/DIR."""

    profile: Annotated[int | None, tyro.conf.arg(metavar="STEP")] = None
    """Write a trace of this step, counted from 0, to the directory profile/ of the run: xprof --logdir RUN/profile."""
    join_timeout: int = preemption.JOIN_SECONDS
    """Seconds within which all hosts of the job must start; otherwise they exit with status 85, to be restarted."""


def main(argv: Sequence[str], progress_type: type[Progress] = Progress) -> None:
    """`progress_type` shows the progress, and may observe it."""
    with contextlib.ExitStack() as scratch:
        with cli.one_line_errors():
            source, words = cli.parse_source(Train, argv)
            source, remote = remote_output.localize(source, scratch)
            flags = cli.parse_settings(Train, source, words)
        train(flags, remote, progress_type)


def train(flags: Train, remote: RemoteDir | None, progress_type: type[Progress]) -> None:
    """Trains in --out, which mirrors `remote` if there is one."""
    config = flags.run
    with contextlib.ExitStack() as job:
        with cli.one_line_errors(), contextlib.ExitStack() as startup:
            cli.require_inputs(config, questions="data.train", accelerator=True)
            if remote and config.rl.method == "sft":
                raise ValueError(f"--out {remote.address}: rl.method sft cannot write to a bucket: give a local path")
            if flags.profile is not None and config.rl.method == "sft":
                raise ValueError("--profile: rl.method sft does not support profiling: omit it")
            trackers.check_installed(config.rl.trackers)
            if flags.out and not flags.resume:
                outputs.require_vacant(flags.out)
            hosts = job.enter_context(preemption.joined(timeout=flags.join_timeout))
            if hosts.count > 1 and flags.out is None:
                raise ValueError(f"--out is missing: give one directory that all {hosts.count} hosts write to")
            out = flags.out
            if hosts.first and out and flags.resume:
                job.enter_context(outputs.output_lock(out, wait=RESTART_SECONDS if flags.start_or_resume else 0.0))
            elif hosts.first or out is None:
                kind = Path(flags.config or "train").stem
                out = startup.enter_context(outputs.new_output_dir(out, kind, locks=job))
            place = remote.address if remote else out
            if remote and flags.resume and hosts.first:
                remote.fetch()  # the files that training appends to and reports on

            # JAX takes seconds to import; --help and errors do not need it.
            from memsearcher_jax.rl import init_state, loop, setup
            from memsearcher_jax.runtime.profiler import StepProfiler, check_step
            from memsearcher_jax.sft import train as sft
            from memsearcher_jax.training import checkpoint

            settings = with_own_tokenizer(out, config) if flags.resume else config
            # What restarts this job may restart its services, too.
            outage = config.rl.max_search_outage if flags.resume else 0.0
            run = hosts.in_turn(lambda: setup.prepare(settings, out, max_outage=outage))
            if run.config.rl.method == "sft":
                sft.check(run)
            steps = run.config.rl.steps  # may come from rl.epochs and the data
            done = checkpoint.latest_step(checkpoints_of(out)) if flags.resume else None
            seen = hosts.exchange(json.dumps([to_dict(config), flags.resume, done]).encode())
            if len(set(seen or ())) > 1:
                raise ValueError(f"the hosts have other settings or see other files in {place}: start all alike")
            if done is not None and done >= steps:
                if hosts.first:
                    print(f"{place}: step {done} of {steps} is already done; raise --rl.steps to continue")
                    if not has_ended(out):  # a stop came between the last checkpoint and the report
                        finish(out, place, remote, config.rl)
                    outputs.write_json(flags.json, {"run": str(place), "metrics": read_metrics(out / METRICS_FILE)})
                return
            check_step(flags.profile, done or 0, steps)
            state = (
                init_state.restored_state(run, out, hosts.check)
                if flags.resume
                else init_state.initial_state(run, hosts.check)
            )
            writer = None
            if hosts.first:
                cli.print_skipped(run.problems)
                for name, then, now in differences(read_run_config(out), config) if flags.resume else ():
                    print(f"{place}: {name} changed: {then!r} -> {now!r}", file=sys.stderr)
                open_run_folder(out, config, run.tokenizer.folder)
                write_card(out, config, index=out / INDEX, step=state.initial_step)
                tracking = {
                    "resume_step": state.step if flags.resume else None,
                    "trackers": config.rl.trackers,
                    "settings": to_dict(config),
                }
                if remote:
                    remote.send()
                writer = UploadingWriter(remote, **tracking) if remote else MetricsWriter(out, **tracking)
                print(f"{place}: {len(run.problems.train)} problems, step {state.step} of {steps}", file=sys.stderr)
        bar = progress_type(preemption.label(hosts, "train"), steps, done=state.step)
        with (
            cli.stop_in_one_line(f"the checkpoints in {place} are intact; fix the error and rerun with --resume"),
            writer or contextlib.nullcontext(),
            bar as progress,
        ):
            if config.rl.method == "grpo":
                with StepProfiler(out, flags.profile) as trace:
                    last = loop.train(run, state, out, writer, progress, hosts, trace)
            else:
                assert writer is not None, "rl.method sft runs on one host"
                last = sft.train(run, state, out, writer, progress, hosts)
        if hosts.first:
            hint = f"; read {place}/report.html" if finish(out, place, remote, config.rl) else ""
            outputs.write_json(flags.json, {"run": str(place), "metrics": read_metrics(out / METRICS_FILE)})
            print(f"{place}: step {steps} done, {format_metrics(last)}{hint}")


def finish(out: Path, place: object, remote: RemoteDir | None, settings: RLConfig) -> bool:
    """Writes the report and the results on the card of a trained run; returns whether there is a report."""
    with cli.one_line_errors():
        if remote:
            remote.fetch_trajectories(REPORT_TRAJECTORIES // (settings.prompts_per_step * settings.group_size) + 1)
        reported = write_report(out, place)
        add_results(out, last_steps(out))  # last: `has_ended` looks for them
        if remote:
            remote.send()
    return reported


def last_steps(out: Path) -> dict[str, Any]:
    """The results of training for its card: means over the last steps, with bootstrap intervals over these steps."""
    steps = read_metrics(out / METRICS_FILE)
    last, rng = steps[-LAST_STEPS:], np.random.default_rng(0)
    wanted = (MetricName.REWARD, MetricName.EXACT_MATCH)
    names = [name for name in wanted if all(math.isfinite(step.get(name, math.nan)) for step in last)]
    means = {str(name): asdict(bootstrap_mean([step[name] for step in last], rng)) for name in names}
    return {"steps": len(steps), "last_steps": len(last), "metrics": means}


def write_report(out: Path, place: object) -> bool:
    """Writes the learning curves and the report of a finished run, which a failure does not fail."""
    try:
        training_curves(out / METRICS_FILE, out / CURVES_FILE)
        write_page(out, out / "report.html", cli.MEMORY_RULES, max_trajectories=REPORT_TRAJECTORIES)
    except Exception as error:  # whatever is wrong with what it shows, the weights are trained
        reason = cli.printable(f"{type(error).__name__}: {error}")
        hint = f"once that is fixed: launch/report.py {place}"
        print(f"{place}: no report ({reason}); {hint}", file=sys.stderr, flush=True)
        return False
    return True


if __name__ == "__main__":
    cli.run(main)
