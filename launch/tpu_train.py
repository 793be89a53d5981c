"""Trains a search agent by multi-context GRPO.

python launch/tpu_train.py --config tiny                                  # on a laptop, no download
python launch/tpu_train.py --config qwen7b --model.path DIR --data.train FILES \\
    --retrieval.corpus FILE --retrieval.encoder DIR
python launch/tpu_train.py --resume --out runs/NAME                       # continue after a stop
"""

from __future__ import annotations

if __name__ == "__main__":
    import memsearcher_jax.launch.__main__  # noqa: F401  (runs `main` below)

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from memsearcher_jax.config import to_dict
from memsearcher_jax.hosts import preemption
from memsearcher_jax.launch import cli, job_output, outputs, preconditions
from memsearcher_jax.logs import trackers
from memsearcher_jax.logs.metrics import MetricsWriter
from memsearcher_jax.logs.progress import Progress, announced
from memsearcher_jax.logs.run_facts import has_ended
from memsearcher_jax.ranges import JoinSeconds
from memsearcher_jax.runs.inputs import keep_inputs, with_own_inputs
from memsearcher_jax.runs.remote_dir import RemoteDir, UploadingWriter
from memsearcher_jax.runs.run_dir import checkpoints_of, open_run_folder
from memsearcher_jax.training.config import learning_rate_plan

RESTART_SECONDS = 120.0  # in which the processes of the previous attempt of a job must end


@dataclass(frozen=True)
class Train(cli.Command, job_output.TrainSource):
    """Train a search agent by multi-context GRPO. --out may also be a directory of a bucket, gs://BUCKET/DIR."""

    profile: Annotated[int | None, tyro.conf.arg(metavar="STEP")] = None
    """Write a trace of this step, counted from 0, to the directory profile/ of the run: xprof --logdir RUN/profile."""
    join_timeout: JoinSeconds = preemption.JOIN_SECONDS
    """Seconds within which all hosts of the job must start; otherwise they exit with status 85, to be restarted."""


def main(argv: Sequence[str], progress_type: type[Progress] = Progress) -> None:
    """`progress_type` shows the progress, and may observe it."""
    with contextlib.ExitStack() as scratch:
        with cli.one_line_errors():
            source, words = cli.parse_source(Train, argv)
            source, remote = job_output.localize(source, scratch)
            flags = cli.parse_settings(Train, source, words)
        train(flags, remote, progress_type)


def train(flags: Train, remote: RemoteDir | None, progress_type: type[Progress]) -> None:
    """Trains in --out, which mirrors `remote` if there is one."""
    config = flags.run
    with contextlib.ExitStack() as job:
        with cli.one_line_errors(), contextlib.ExitStack() as startup, announced() as begin:
            preconditions.require_inputs(config, questions="data.train", accelerator=True)
            trackers.check_installed(config.rl.trackers)
            if flags.out and not flags.resume:
                outputs.require_vacant(flags.out)
            hosts = job.enter_context(preemption.joined(timeout=flags.join_timeout))
            kind = Path(flags.config or "train").stem
            wait = RESTART_SECONDS if flags.start_or_resume else 0.0
            out = job_output.open_output(flags, kind, hosts, startup, job, wait)
            place = remote.address if remote else out
            if not remote:
                job_output.require_shared(out, hosts)
            if remote and flags.resume and hosts.first:
                remote.fetch()  # the files that training appends to and reports on

            begin("loading JAX")  # seconds; --help and errors do not need it
            from memsearcher_jax.rl import setup
            from memsearcher_jax.rl.state import TrainedBy, needs_initial_weights, open_state, require_trained
            from memsearcher_jax.rl.training_run import open_collector, train_run
            from memsearcher_jax.training import checkpoint

            own = with_own_inputs(out, config) if flags.resume else config
            done = checkpoint.latest_step(checkpoints_of(out)) if flags.resume else None
            reads_weights = done is None or needs_initial_weights(config)
            begin("opening the model's files, the questions and the index")
            # What restarts this job may restart its services, too.
            outage = config.rl.max_search_outage if flags.resume else 0.0
            run = hosts.in_turn(lambda: setup.prepare(own, out, max_outage=outage, weights=reads_weights))
            steps = run.config.rl.steps  # may come from rl.epochs and the data
            views = hosts.exchange(json.dumps([to_dict(config), flags.resume, done]).encode())
            if len(set(views or ())) > 1:
                raise ValueError(f"the hosts have other settings or see other files in {place}: start all alike")
            endings = hosts.exchange(b"ended" if has_ended(out) else b"goes on")
            assert endings, "every host gives one"
            run_has_ended = endings[0] == b"ended"  # only the first host has the files of a bucket
            if done is not None and done >= steps and run_has_ended:
                require_trained(out, TrainedBy.RL, checkpoint.run_meta(checkpoints_of(out), run.config.model))
                if hosts.first:
                    more = "epochs" if run.config.rl.epochs else "steps"
                    line = f"step {done} of {steps} is already done; raise --rl.{more} to continue"
                    job_output.show_result(flags, out, place, line)
                return
            if flags.profile is not None and not (done or 0) <= flags.profile < steps:
                raise ValueError(f"--profile {flags.profile}: choose a step from {done or 0} to {steps - 1}")
            begin("loading the weights")
            state, start = open_state(run, config, out if flags.resume else None)
            collector = open_collector(state, start, hosts)
            writer = None
            if hosts.first:
                preconditions.print_skipped(run.problems)
                inputs, notes = keep_inputs(out, config, start.initial_step, weights=reads_weights)
                start = replace(start, inputs=inputs)
                for name, then, now in start.changed:
                    print(f"{place}: {name} changed: {then!r} -> {now!r}", file=sys.stderr)
                for note in notes:
                    print(f"{place}: {note}", file=sys.stderr)
                open_run_folder(out, config, run.tokenizer.folder)
                resume_step = state.step if flags.resume else None
                tracking = {"resume_step": resume_step, "trackers": config.rl.trackers, "settings": to_dict(config)}
                if remote:
                    remote.send()
                writer = UploadingWriter(remote, **tracking) if remote else MetricsWriter(out, **tracking)
                position = f"{place}: {len(run.problems.train)} problems, step {state.step} of {steps}"
                print(f"{position}; the learning rate {learning_rate_plan(state.trainer.config)}", file=sys.stderr)
                if run.config.sampling.is_quantized:
                    print(f"{place}: {int8_correction(run.config.training.tis_cap)}", file=sys.stderr)
        bar = progress_type(preemption.label(hosts, "train"), steps, done=state.step)
        with job_output.way_on(place), writer or contextlib.nullcontext(), bar as progress:
            hosts.training.set()
            train_run(state, start, collector, out, writer, progress, flags.profile)
        if hosts.first:
            job_output.finish(flags, out, place, steps, remote)


def int8_correction(tis_cap: float) -> str:
    """How training corrects for a sampler that rounds to int8, in a line."""
    if tis_cap:
        correction = f"weights of the losses, at most {tis_cap:g}, correct for it"
    else:
        correction = "the clipped ratio alone corrects for it"
    return f"the sampler rounds to int8; {correction}"
