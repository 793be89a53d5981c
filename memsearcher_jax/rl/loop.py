"""Multi-context GRPO, step by step, on every host of the run:

1. take this host's share of the next problems and roll out G trajectories of each with the weights of now;
2. score every trajectory, or every context of one that has read a stream;
3. normalise the rewards within each group; every context of a trajectory gets its advantage;
4. tell the other hosts; all pack all contexts into the same rows and update, a mini-batch of rows at a time;
5. write the numbers, the trajectories and, every so often, a checkpoint; evaluate, if the config asks for it.

Whoever is told to stop breaks its rollout off and says so at 4: all hosts drop that step, save and leave.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from memsearcher_jax.data.problems import ProblemStream
from memsearcher_jax.report.metrics import Metrics, MetricsWriter
from memsearcher_jax.report.progress import Progress
from memsearcher_jax.report.trajectories import step_path, write_packed
from memsearcher_jax.rl import build, exam, score
from memsearcher_jax.rl.alarms import Alarms
from memsearcher_jax.rl.evaluate import measure, run_all, scored
from memsearcher_jax.rl.hosts import Hosts, Interrupted
from memsearcher_jax.rl.keys import key_for, numpy_rng
from memsearcher_jax.rl.part import gather, part_of, spread_of
from memsearcher_jax.rl.phases import Phases
from memsearcher_jax.rl.rollout import jobs_for
from memsearcher_jax.rl.run_folder import checkpoints_of
from memsearcher_jax.rl.start import Start
from memsearcher_jax.rl.vitals import vitals
from memsearcher_jax.training.checkpoint import Checkpoints


def train(
    run: build.Run,
    start: Start,
    out: Path,
    writer: MetricsWriter | None,
    progress: Progress,
    hosts: Hosts | None = None,
    at_step: Callable[[int], None] = lambda step: None,
) -> Metrics:
    """Goes on from `start` to step `rl.steps`; returns the last step's numbers. Everything is written under `out`.

    Of several hosts the first one writes, and only it has a writer. Raises Stopped when one of them was told to stop
    and all is saved, RunEnded for an alarm that asks for it. `at_step` hears the number of each step as it begins.
    """
    config, rl, hosts = run.config, run.config.rl, hosts or Hosts()
    stream = ProblemStream(run.problems.train, config.seed)
    driver = build.make_driver(run, check=hosts.check)
    examiner = build.make_driver(run, evaluation=True, check=hosts.check) if rl.evaluate_every else None
    summarise = exam.summarise_facts if start.exam else score.summarise_facts
    trainer, state, position = start.trainer, start.state, start.position
    numbers, alarms = Metrics(), Alarms(config.alarms, progress.note)
    with Checkpoints(checkpoints_of(out), keep=rl.keep_checkpoints) as checkpoints:
        for step in range(start.step, rl.steps):
            at_step(step)
            phases, part = Phases(progress.activity), None
            key = key_for(config.seed, "rollout", step)
            problems = stream.share(position, rl.problems, host=hosts.index, hosts=hosts.count)
            jobs = jobs_for(problems, rl.rollouts, first=rl.problems * hosts.index // hosts.count)
            with suppress(Interrupted):
                with phases("rollout"):
                    params = build.sampler_params(run, state.params)
                    trajectories = run_all(driver, jobs, params, key, progress.activity)
                with phases("score"):
                    batch = scored(trajectories, key, progress.activity, start.exam)
                    part = part_of(batch, rl, driver, phases["rollout"])
            with phases("share"):
                whole = gather(hosts, part)
            if whole is None:
                if step > (checkpoints.newest or 0):
                    checkpoints.save(step, state, config.model, {"position": position})
                raise hosts.stopped(step)
            with phases("update"):
                rng = numpy_rng(config.seed, "rows", step)
                state, learned = trainer.learn(state, whole.samples, rng, progress.activity)
            position += rl.problems
            numbers = summarise(whole.facts) | learned | vitals(whole) | {"groups_with_spread": spread_of(whole, rl)}
            numbers |= alarms.look(step, numbers)
            if examiner and (step + 1) % rl.evaluate_every == 0:
                with phases("evaluate"):
                    params = build.sampler_params(run, state.params)
                    facts = measure(run, examiner, params, progress.activity, start.exam, hosts)
                    numbers |= {f"test/{name}": value for name, value in (summarise(facts) if facts else {}).items()}
            with phases("write"):
                if hosts.first and whole.packed:
                    write_packed(step_path(out, step), whole.packed)
                if (step + 1) % rl.checkpoint_every == 0 or step + 1 == rl.steps:
                    checkpoints.save(step + 1, state, config.model, {"position": position})
            numbers |= phases.metrics
            if writer:
                writer.write(step, numbers)
            progress.advance(numbers)
    return numbers
