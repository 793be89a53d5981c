"""Multi-context GRPO, step by step, on every host of the run:

1. take this host's share of the next problems and roll out G trajectories of each with the current weights, or go on
   with those that earlier steps have carried over (`rl.carry_over`); 2 to 4 are repeated with further problems where
   groups without spread are replaced (`rl.refill`);
2. reward every trajectory (Mem-alpha: every context);
3. normalise the rewards over the trajectories of each group, and give every context its trajectory's advantage;
4. exchange examples with the other hosts;
5. update: all hosts pack all contexts into the same rows, a mini-batch of rows at a time;
6. publish the new weights to the engines;
7. write metrics, trajectories and checkpoints, and evaluate if the config asks for it.

If the metrics show that the policy collapses and `health.on_collapse` is rollback, the step ends with the train state
of the checkpoint with the best evaluation. Steps and problems go on from where they are.

A host that is asked to stop interrupts its rollout and says so in 4: all hosts drop that step, save and leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from memsearcher_jax.agent.registry import WORKFLOWS
from memsearcher_jax.data.problems import ProblemLoader
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.metric_names import MetricName
from memsearcher_jax.logs.metrics import Metrics, MetricsWriter
from memsearcher_jax.logs.progress import Progress
from memsearcher_jax.logs.trajectories import compress_trajectories, step_path, summarize_trajectory
from memsearcher_jax.rl.advantages import multi_context_advantages
from memsearcher_jax.rl.batch import RolloutBatch, concatenate, exchange
from memsearcher_jax.rl.carry_over import (
    Carried,
    Problems,
    nothing_carried,
    restored,
    rollout,
    rollout_key,
    step_problems,
    to_text,
)
from memsearcher_jax.rl.evaluate import evaluate_together
from memsearcher_jax.rl.init_state import RunState, rolled_back
from memsearcher_jax.rl.metrics import rollout_metrics, staleness_metrics, trajectory_metrics
from memsearcher_jax.rl.rng import named_key, named_rng
from memsearcher_jax.rl.rollout import RolloutDriver, group_numbers
from memsearcher_jax.rl.setup import Run, make_driver, publish
from memsearcher_jax.rl.stream_reward import for_evaluation
from memsearcher_jax.runtime.distributed import Hosts, Interrupted
from memsearcher_jax.runtime.health import HealthMonitor, RunAborted
from memsearcher_jax.runtime.run_dir import checkpoints_of
from memsearcher_jax.runtime.timing import Timer
from memsearcher_jax.training.checkpoint import Checkpoints


def train(
    run: Run,
    start: RunState,
    out: Path,
    writer: MetricsWriter | None,
    progress: Progress,
    hosts: Hosts | None = None,
    at_step: Callable[[int], None] = lambda step: None,
) -> Metrics:
    """Trains from `start` to step `rl.steps`, writes everything under `out`, and returns the last step's metrics.

    On several hosts the first one writes, and only it has a writer. `at_step` is called with the number of each step.
    Raises Stopped when a host was asked to stop and the checkpoint is saved, RunAborted where an alarm demands it.
    """
    config, rl, hosts, notify = run.config, run.config.rl, hosts or Hosts(), progress.activity
    loader = ProblemLoader(run.problems.train, config.seed, run.problems.mixture)
    problems = step_problems(loader, start.step, start.position, rl)
    driver = make_driver(run, check=hosts.check)
    engine = driver.executor.engine
    eval_driver = make_driver(run, evaluation=True, check=hosts.check, engine=engine) if rl.evaluate_every else None
    trainer, reward_fn, state = start.trainer, start.reward_fn, start.state
    metrics, health = Metrics(), HealthMonitor(config.health, progress.note, start.health)
    reads_streams = WORKFLOWS[config.agent.workflow].reads_streams
    params = publish(run, trainer.weights(state))
    carried = restored(start.carried, start.step, problems, driver, rl, hosts)

    position = start.position

    def save(step: int) -> None:
        meta = start.meta(position, to_text(carried, hosts) if rl.carry_over else "", health.state)
        checkpoints.save(step, state, config.model, meta)

    def evaluate(driver: RolloutDriver, step: int) -> Metrics:
        """Test metrics of the weights after `step` steps; empty if the run is to stop."""
        summaries = evaluate_together(run, driver, params, notify, for_evaluation(reward_fn), hosts)
        if not summaries:
            return {}
        test_metrics = trajectory_metrics(summaries, reads_streams=reads_streams)
        # What an outage leaves of an evaluation does not measure these weights.
        complete = test_metrics[MetricName.UNSCORED] <= config.health.max_unscored
        health.record_evaluation(step, test_metrics[MetricName.REWARD] if complete else math.nan)
        return {f"test/{name}": value for name, value in test_metrics.items()}

    def sample(
        step: int, carried: Carried, problems: Problems, timer: Timer, refill: int = 0
    ) -> tuple[RolloutBatch | None, Carried]:
        """Steps 1 to 4 of the module. Returns the batch of all hosts, None if one was asked to stop, and what this host
        carries on."""
        batch = None
        # The same key in all steps: what an answerer has cached is what a resumed run, without its cache, samples.
        key = named_key(config.seed, "rewards", 0)
        with suppress(Interrupted):
            with timer("rollout"):
                draws = rollout_key(config.seed, step, rl, refill)
                trajectories, carried, stats = rollout(driver, carried, problems, params, draws, step, rl, notify)
            engine.release()  # rewards and the update have the memory of the sampler's cache
            with timer("rewards"):
                rewarded = reward_fn(trajectories, key, notify)
            examples = multi_context_advantages(rewarded, group_numbers(len(rewarded), rl.group_size), rl)
            summaries = [summarize_trajectory(one) for one in rewarded]
            kept = compress_trajectories(rewarded) if rl.save_trajectories else b""
            batch = RolloutBatch(examples, summaries, stats, kept)
        with timer("gather"):
            return exchange(hosts, batch), carried

    with Checkpoints(checkpoints_of(out), keep=rl.keep_checkpoints, best=lambda: health.state.best_step) as checkpoints:
        if eval_driver and health.state.evaluated != start.step:
            # A rollback needs something to restore, and a stop may have interrupted the evaluation.
            was_due = start.step > 0 and start.step % rl.evaluate_every == 0
            if was_due or (health.rolls_back and health.state.best_step is None):
                evaluate(eval_driver, start.step)
            if health.rolls_back and checkpoints.newest is None:
                save(start.step)
        for step in range(start.step, rl.steps):
            at_step(step)
            timer = Timer(notify)
            batch, unfinished = sample(step, carried, problems, timer)
            taken, refills = rl.prompts_per_step, 0
            while batch and refills < rl.refill:
                if not (missing := rl.prompts_per_step - batch.mixed_groups(rl.group_size).count(True)):
                    break
                further, refills = loader.batch(position + taken, missing), refills + 1
                none = nothing_carried(step, missing).share(hosts.index, hosts.count)
                more, _ = sample(step, none, lambda _, further=further: further, timer, refills)
                batch = more and concatenate([batch, more], sum)
                taken += missing
            if batch is None:
                if step > (checkpoints.newest or 0):
                    save(step)
                raise hosts.stopped(step)
            position += taken
            if rl.refill:
                problems = step_problems(loader, step + 1, position, rl)
            carried = unfinished
            metrics = trajectory_metrics(batch.summaries, reads_streams=reads_streams) | rollout_metrics(batch.stats)
            # Trajectories that an outage leaves are those that did not search: not what to learn from.
            examples = batch.examples if metrics[MetricName.UNSCORED] <= config.health.max_unscored else ()
            del params  # the update has the memory of the sampler's weights, too
            with timer("update"):
                rng = named_rng(config.seed, "rows", step)
                state, update_metrics = trainer.step(state, examples, rng, notify)
            with timer("publish"):
                params = publish(run, trainer.weights(state))
            metrics |= update_metrics
            mixed = batch.mixed_groups(rl.group_size)
            metrics["frac_mixed_groups"] = sum(mixed) / max(1, len(mixed))
            if rl.refill:
                metrics |= {"refills": float(refills), "replaced_groups": float(mixed.count(False))}
            if rl.carry_over:
                metrics |= staleness_metrics(batch.summaries, step, batch.stats)
            try:
                metrics |= health.check(step, metrics)
            except RunAborted:
                if writer:
                    writer.write(step, metrics | timer.metrics)
                raise
            if health.must_roll_back:
                progress.note(f"step {step}: rollback to the checkpoint of step {health.state.best_step}")
                with timer("rollback"):
                    del state, params  # the restored ones take their memory
                    trainer, state = rolled_back(run, trainer, checkpoints, health.state)
                    params = publish(run, trainer.weights(state))
                carried = carried.restarted(step)  # the policy that has sampled them is gone
            if eval_driver and (step + 1) % rl.evaluate_every == 0:
                with timer("evaluate"):
                    metrics |= evaluate(eval_driver, step + 1)
            with timer("write"):
                if hosts.first and batch.trajectories:
                    atomic_write(step_path(out, step), batch.trajectories)
                if step + 1 in (rl.steps, health.state.best_step) or (step + 1) % rl.checkpoint_every == 0:
                    save(step + 1)
            metrics |= timer.metrics
            if writer:
                writer.write(step, metrics)
            progress.advance(metrics)
    return metrics
