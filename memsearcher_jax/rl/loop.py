"""Multi-context GRPO, step by step:

1. take the next problems and roll out G trajectories of each with the weights of now;
2. score every trajectory;
3. normalise the rewards within each group and copy the advantage to every context of the trajectory;
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
from memsearcher_jax.rl.assemble import assemble
from memsearcher_jax.rl.evaluate import evaluate, roll_out
from memsearcher_jax.rl.keys import key_for, numpy_rng
from memsearcher_jax.rl.phases import Phases
from memsearcher_jax.rl.rollout import jobs_for
from memsearcher_jax.rl.start import Start
from memsearcher_jax.training.checkpoint import Checkpoints


def train(run: build.Run, start: Start, out: Path, writer: MetricsWriter, progress: Progress) -> Metrics:
    """Goes on from `start` to step `rl.steps`; returns the last step's numbers. Everything is written under `out`."""
    config, rl = run.config, run.config.rl
    stream = ProblemStream(run.problems.train, config.seed)
    driver = build.make_driver(run)
    examiner = build.make_driver(run, evaluation=True) if rl.evaluate_every else None
    trainer, state, position = start.trainer, start.state, start.position
    numbers: Metrics = {}
    with Checkpoints(out / "checkpoints", keep=rl.keep_checkpoints) as checkpoints:
        for step in range(start.step, rl.steps):
            phases = Phases(progress.activity)
            with phases("rollout"):
                problems = stream.take(position, rl.problems)
                params = build.sampler_params(run, state.params)
                key = key_for(config.seed, "rollout", step)
                batch = roll_out(driver, jobs_for(problems, rl.rollouts), params, key, progress.activity)
            with phases("update"):
                rewards = [one.reward for one in batch]
                groups = [index // rl.rollouts for index in range(len(batch))]
                samples = assemble(
                    [one.trajectory for one in batch],
                    rewards,
                    groups,
                    last_only=rl.credit == "last context",
                    even_groups=rl.even_groups,
                )
                state, learned = trainer.learn(state, samples, numpy_rng(config.seed, "rows", step), progress.activity)
            position += len(problems)
            numbers = score.summarise(batch) | learned | {"groups_with_spread": score.spread(rewards, groups)}
            numbers |= score.sampler_numbers(driver.engine.counters, phases["rollout"])
            if rl.evaluate_every and (step + 1) % rl.evaluate_every == 0:
                with phases("evaluate"):
                    tested = evaluate(run, examiner, build.sampler_params(run, state.params), progress.activity)
                    numbers |= {f"test/{name}": value for name, value in score.summarise(tested).items()}
            with phases("write"):
                if rl.save_trajectories:
                    write_trajectories(step_path(out, step), batch)
                if (step + 1) % rl.checkpoint_every == 0 or step + 1 == rl.steps:
                    checkpoints.save(step + 1, state, config.model, {"position": position})
            numbers |= phases.metrics
            writer.write(step, numbers)
            progress.advance(numbers)
    return numbers
