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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from memsearcher_jax.config import RunConfig, to_dict, with_settings
from memsearcher_jax.hosts import preemption
from memsearcher_jax.launch import cli, job_output, outputs, preconditions
from memsearcher_jax.logs import trackers
from memsearcher_jax.logs.metrics import MetricsWriter
from memsearcher_jax.logs.progress import Progress, announced
from memsearcher_jax.logs.run_facts import has_ended
from memsearcher_jax.planning.roofline import CHIPS, Topology
from memsearcher_jax.ranges import JoinSeconds
from memsearcher_jax.runs.inputs import keep_inputs, with_own_inputs
from memsearcher_jax.runs.remote_dir import RemoteDir, UploadingWriter
from memsearcher_jax.runs.run_dir import checkpoints_of, open_run_folder
from memsearcher_jax.training.config import learning_rate_plan

if TYPE_CHECKING:
    from memsearcher_jax.hosts.distributed import Hosts
    from memsearcher_jax.rl.collector import Collector
    from memsearcher_jax.rl.setup import Run
    from memsearcher_jax.rl.state import RunState, SavedProgress

RESTART_SECONDS = 120.0  # in which the processes of the previous attempt of a job must end


@dataclass(frozen=True)
class Train(cli.Command, job_output.TrainSource):
    """Train a search agent by multi-context GRPO. --out may also be a directory of a bucket, gs://BUCKET/DIR."""

    suggest: bool = False
    """Choose the settings that `plan_tpu.py --suggest` chooses, for the TPU that is present: rows, remat policy, slots
    and so on. It compiles for minutes. A run keeps them from its first checkpoint on."""
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


@dataclass(frozen=True)
class Job:
    """What one host of a training job was asked for, and where it writes."""

    flags: Train
    hosts: Hosts
    out: Path
    remote: RemoteDir | None  # which `out` mirrors

    @property
    def place(self) -> str | Path:
        """The directory that the user named."""
        return self.remote.address if self.remote else self.out

    @property
    def config(self) -> RunConfig:
        return self.flags.run


@dataclass(frozen=True)
class Training:
    """What `training_run.train_run` needs."""

    state: RunState
    start: SavedProgress
    collector: Collector
    writer: MetricsWriter | None  # on the first host


def train(flags: Train, remote: RemoteDir | None, progress_type: type[Progress]) -> None:
    """Trains in --out, which mirrors `remote` if there is one."""
    with contextlib.ExitStack() as stack:
        with cli.one_line_errors(), contextlib.ExitStack() as startup, announced() as begin:
            job = open_job(flags, remote, startup, stack)
            training = open_training(job, begin)
        if training is None:
            return
        from memsearcher_jax.rl.training_run import train_run

        state = training.state
        steps = state.run.config.rl.steps
        bar = progress_type(preemption.label(job.hosts, "train"), steps, done=state.step)
        with job_output.way_on(job.place), training.writer or contextlib.nullcontext(), bar as progress:
            job.hosts.training.set()
            train_run(state, training.start, training.collector, job.out, training.writer, progress, flags.profile)
        if job.hosts.first:
            job_output.finish(flags, job.out, job.place, steps, remote)


def open_job(flags: Train, remote: RemoteDir | None, startup: contextlib.ExitStack, stack: contextlib.ExitStack) -> Job:
    """Joins the hosts and opens --out, which stays locked until `stack` closes. Raises ValueError or OSError.

    A new directory is removed if `startup` fails.
    """
    config = flags.run
    if flags.suggest:
        preconditions.require_planned_completers(config)
    preconditions.require_inputs(config, questions="data.train", accelerator=True)
    trackers.check_installed(config.rl.trackers)
    if flags.out and not flags.resume:
        outputs.require_vacant(flags.out)
    hosts = stack.enter_context(preemption.joined(timeout=flags.join_timeout))
    kind = Path(flags.config or "train").stem
    wait = RESTART_SECONDS if flags.start_or_resume else 0.0
    out = job_output.open_output(flags, kind, hosts, startup, stack, wait)
    if not remote:
        job_output.require_shared(out, hosts)
    if remote and flags.resume and hosts.first:
        remote.fetch()  # the files that training appends to and reports on
    return Job(flags, hosts, out, remote)


def open_training(job: Job, begin: Callable[[str], None]) -> Training | None:
    """Opens the model's files, the data, the weights and the run's folder; None if all steps are already done.

    `begin` announces each stage. Raises ValueError or OSError.
    """
    begin("loading JAX")  # seconds; --help and errors do not need it
    from memsearcher_jax.rl.state import TrainedBy, needs_initial_weights, open_state, require_trained
    from memsearcher_jax.rl.training_run import open_collector
    from memsearcher_jax.training import checkpoint

    flags = job.flags
    checkpoints = checkpoints_of(job.out)
    done = checkpoint.latest_step(checkpoints) if flags.resume else None
    reads_weights = done is None or needs_initial_weights(job.config)
    job, run = open_run(job, done, reads_weights, begin)
    config = job.config
    steps = run.config.rl.steps  # may come from rl.epochs and the data
    run_has_ended = ended_on_first_host(job)
    if done is not None and done >= steps and run_has_ended:
        require_trained(job.out, TrainedBy.RL, checkpoint.run_meta(checkpoints, run.config.model))
        if job.hosts.first:
            more = "epochs" if run.config.rl.epochs else "steps"
            line = f"step {done} of {steps} is already done; raise --rl.{more} to continue"
            job_output.show_result(flags, job.out, job.place, line)
        return None
    if flags.profile is not None and not (done or 0) <= flags.profile < steps:
        raise ValueError(f"--profile {flags.profile}: choose a step from {done or 0} to {steps - 1}")
    begin("loading the weights")
    state, start = open_state(run, config, job.out if flags.resume else None)
    collector = open_collector(state, start, job.hosts)
    if not job.hosts.first:
        return Training(state, start, collector, None)
    inputs, notes = keep_inputs(job.out, config, start.initial_step, weights=reads_weights)
    start = replace(start, inputs=inputs)
    print_notes(job, run, start, notes)
    writer = open_writer(job, run, state.step)
    print_start(job, state)
    return Training(state, start, collector, writer)


def open_run(job: Job, done: int | None, reads_weights: bool, begin: Callable[[str], None]) -> tuple[Job, Run]:
    """The checked parts of the run; the job has the settings that --suggest chooses, until there is a checkpoint.

    `done`: the step of the newest checkpoint. Raises ValueError or OSError, for settings that exceed the devices, too.
    """
    import jax

    from memsearcher_jax.planning import present_devices
    from memsearcher_jax.rl import setup

    flags = job.flags
    begin("opening the model's files, the questions and the index")
    config = with_own_inputs(job.out, job.config) if flags.resume else job.config
    topology = present_devices.present_topology(jax.devices(), jax.local_devices())
    chooses_settings = flags.suggest and done is None
    if chooses_settings:
        if topology is None or topology.generation not in CHIPS:
            raise ValueError(f"--suggest is for TPUs, and this is {jax.devices()[0].device_kind}: omit it")
        # They are valid on these devices, so that everything else can be checked before minutes of compilation.
        config = with_settings(config, present_devices.smallest_settings(config, topology))
    # What restarts this job may restart its services, too.
    outage = config.rl.max_search_outage if flags.resume else 0.0
    run = job.hosts.in_turn(lambda: setup.prepare(config, job.out, max_outage=outage, weights=reads_weights))
    require_alike(job, done)
    if chooses_settings and topology:
        return with_fastest_settings(job, run, topology, begin)
    if flags.suggest and job.hosts.first:
        print(f"{job.place}: --suggest changes nothing after the first checkpoint, of step {done}", file=sys.stderr)
    if topology:
        present_devices.check_fits(run.config, topology)
    return job, run


def with_fastest_settings(job: Job, run: Run, topology: Topology, begin: Callable[[str], None]) -> tuple[Job, Run]:
    """The job and its run with the settings that --suggest chooses. Raises ValueError if none fit."""
    import jax

    from memsearcher_jax.hosts.meshes import make_meshes
    from memsearcher_jax.planning import present_devices, suggest

    def say(line: str) -> None:
        if job.hosts.first:
            print(f"{job.place}: {line}", file=sys.stderr, flush=True)

    as_given = with_settings(run.config, suggest.chosen_settings(job.config))
    chosen = present_devices.fastest_settings(as_given, topology, begin, say)
    choices = job.hosts.exchange(json.dumps(chosen).encode())
    assert choices, "every host gives one"
    chosen = json.loads(choices[0])
    config = with_settings(run.config, chosen)
    meshes = make_meshes(config, jax.devices(), jax.local_devices())
    flags = replace(job.flags, run=with_settings(job.config, chosen))
    return replace(job, flags=flags), replace(run, config=config, meshes=meshes)


def require_alike(job: Job, done: int | None) -> None:
    """Raises ValueError on all hosts unless all have the same settings and see the same newest checkpoint."""
    views = job.hosts.exchange(json.dumps([to_dict(job.config), job.flags.resume, done]).encode())
    if len(set(views or ())) > 1:
        raise ValueError(f"the hosts have other settings or see other files in {job.place}: start all alike")


def ended_on_first_host(job: Job) -> bool:
    """Whether the run has ended, as the first host sees it: only that one has the files of a bucket."""
    endings = job.hosts.exchange(b"ended" if has_ended(job.out) else b"goes on")
    assert endings, "every host gives one"
    return endings[0] == b"ended"


def print_notes(job: Job, run: Run, start: SavedProgress, notes: Sequence[str]) -> None:
    """Prints what the data left out, the settings that changed since the checkpoint, and the notes on the inputs."""
    preconditions.print_skipped(run.problems)
    for name, then, now in start.changed:
        print(f"{job.place}: {name} changed: {then!r} -> {now!r}", file=sys.stderr)
    for note in notes:
        print(f"{job.place}: {note}", file=sys.stderr)


def open_writer(job: Job, run: Run, step: int) -> MetricsWriter:
    """Writes the run's settings, and opens its metrics, which go on at `step` if the run is resumed."""
    config = job.config
    open_run_folder(job.out, config, run.tokenizer.folder)
    resume_step = step if job.flags.resume else None
    tracking = {"resume_step": resume_step, "trackers": config.rl.trackers, "settings": to_dict(config)}
    if job.remote is None:
        return MetricsWriter(job.out, **tracking)
    job.remote.send()
    return UploadingWriter(job.remote, **tracking)


def print_start(job: Job, state: RunState) -> None:
    """Prints where training starts, and with what learning rate and correction."""
    run = state.run
    position = f"{job.place}: {len(run.problems.train)} problems, step {state.step} of {run.config.rl.steps}"
    print(f"{position}; the learning rate {learning_rate_plan(state.trainer.config)}", file=sys.stderr)
    if run.config.sampling.is_quantized:
        print(f"{job.place}: {int8_correction(run.config.training.tis_cap)}", file=sys.stderr)


def int8_correction(tis_cap: float) -> str:
    """How training corrects for a sampler that rounds to int8, in a line."""
    if tis_cap:
        correction = f"weights of the losses, at most {tis_cap:g}, correct for it"
    else:
        correction = "the clipped ratio alone corrects for it"
    return f"the sampler rounds to int8; {correction}"
