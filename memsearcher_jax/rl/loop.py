"""Multi-context GRPO, step by step:

1. take the next problems and roll out G trajectories of each with the weights of now;
2. score every trajectory, or every context of one that has read a stream;
3. normalise the rewards within each group; every context of a trajectory gets its advantage;
4. pack the contexts into rows and update, a mini-batch of rows at a time;
5. write the numbers, the trajectories and, every so often, a checkpoint; evaluate, if the config asks for it.
"""

from __future__ import annotations

from pathlib import Path

from memsearcher_jax.data.problems import ProblemStream
from memsearcher_jax.report.metrics import Metrics, MetricsWriter
from memsearcher_jax.report.progress import Progress
from memsearcher_jax.report.trajectories import step_path, write_trajectories
from memsearcher_jax.rl import build, score
from memsearcher_jax.rl.assemble import samples_of
from memsearcher_jax.rl.evaluate import evaluate, run_all, scored
from memsearcher_jax.rl.keys import key_for, numpy_rng
from memsearcher_jax.rl.phases import Phases
from memsearcher_jax.rl.rollout import jobs_for
from memsearcher_jax.rl.run_folder import checkpoints_of
from memsearcher_jax.rl.start import Start
from memsearcher_jax.rl.vitals import vitals
from memsearcher_jax.training.checkpoint import Checkpoints


def train(run: build.Run, start: Start, out: Path, writer: MetricsWriter, progress: Progress) -> Metrics:
    """Goes on from `start` to step `rl.steps`; returns the last step's numbers. Everything is written under `out`."""
    config, rl = run.config, run.config.rl
    stream = ProblemStream(run.problems.train, config.seed)
    driver = build.make_driver(run)
    examiner = build.make_driver(run, evaluation=True) if rl.evaluate_every else None
    summarise = start.exam.summarise if start.exam else score.summarise
    trainer, state, position = start.trainer, start.state, start.position
    numbers: Metrics = {}
    with Checkpoints(checkpoints_of(out), keep=rl.keep_checkpoints) as checkpoints:
        for step in range(start.step, rl.steps):
            phases = Phases(progress.activity)
            with phases("rollout"):
                problems = stream.take(position, rl.problems)
                params = build.sampler_params(run, state.params)
                key = key_for(config.seed, "rollout", step)
                jobs = jobs_for(problems, rl.rollouts)
                trajectories = run_all(driver, jobs, params, key, progress.activity)
            with phases("score"):
                batch = scored(trajectories, key, progress.activity, start.exam)
            with phases("update"):
                groups = [index // rl.rollouts for index in range(len(batch))]
                samples = samples_of(batch, groups, rl)
                state, learned = trainer.learn(state, samples, numpy_rng(config.seed, "rows", step), progress.activity)
            position += len(problems)
            spread = score.spread([one.reward for one in batch], groups)
            numbers = summarise(batch) | learned | {"groups_with_spread": spread}
            numbers |= vitals(driver, phases["rollout"])
            if rl.evaluate_every and (step + 1) % rl.evaluate_every == 0:
                with phases("evaluate"):
                    params = build.sampler_params(run, state.params)
                    tested = evaluate(run, examiner, params, progress.activity, start.exam)
                    numbers |= {f"test/{name}": value for name, value in summarise(tested).items()}
            with phases("write"):
                if rl.save_trajectories:
                    write_trajectories(step_path(out, step), batch)
                if (step + 1) % rl.checkpoint_every == 0 or step + 1 == rl.steps:
                    checkpoints.save(step + 1, state, config.model, {"position": position})
            numbers |= phases.metrics
            writer.write(step, numbers)
            progress.advance(numbers)
    return numbers
