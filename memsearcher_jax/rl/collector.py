"""What one training step learns from: rollouts of the next problems, their rewards and advantages, of all hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from memsearcher_jax.data.problems import ProblemLoader
from memsearcher_jax.hosts.distributed import Hosts
from memsearcher_jax.logs.metric_names import MetricName
from memsearcher_jax.rl.batch import RolloutBatch, exchange, make_rollout_batch
from memsearcher_jax.rl.metrics import RolloutStats, rollout_metrics, trajectory_metrics
from memsearcher_jax.rl.rewards import RewardFn
from memsearcher_jax.rl.rng import named_key
from memsearcher_jax.rl.rollout import RolloutDriver, make_jobs
from memsearcher_jax.rl.setup import Run
from memsearcher_jax.rl.state import RunState
from memsearcher_jax.rl.timing import Timer
from memsearcher_jax.types import Problem, Trajectory


@dataclass
class Collector:
    """On-policy: a step trains the groups that it began, sampled with the current weights.

    `collect` changes nothing that a stop would have to take back; `commit` does.
    """

    run: Run
    driver: RolloutDriver
    reward_fn: RewardFn
    loader: ProblemLoader
    hosts: Hosts
    position: int = 0  # problems that committed steps have taken from the loader
    taken: int = 0  # problems that the step under way has taken

    def collect(self, state: RunState, timer: Timer) -> RolloutBatch:
        """The batch of a step, the same on all hosts. Raises RunEnded on all of them if one is to stop."""
        problems = self.take(self.run.config.rl.prompts_per_step)
        return self.with_metrics(self.sample_groups(problems, state, timer))

    def commit(self) -> None:
        """The step under way has trained its batch."""
        self.position += self.taken
        self.taken = 0

    def restart(self) -> None:
        """Forgets what other weights have sampled."""

    def meta(self) -> dict[str, Any]:
        """What a checkpoint stores, as plain JSON. Every host must call it."""
        return {"position": self.position}

    def take(self, count: int) -> list[Problem]:
        """The next problems of the step under way."""
        first = self.position + self.taken
        self.taken += count
        return self.loader.batch(first, count)

    def sample_groups(
        self, problems: Sequence[Problem], state: RunState, timer: Timer, refill: int = 0
    ) -> RolloutBatch:
        """G trajectories of each problem, of which each host samples its share. `refill` selects other draws."""
        numbers = self.hosts.share(len(problems))
        jobs = make_jobs([problems[number] for number in numbers], self.run.config.rl.group_size, numbers.start)
        key = named_key(self.run.config.seed, "rollout", state.step)
        if refill:
            key = jax.random.fold_in(key, refill)
        batch = None
        with self.hosts.guarded():
            with timer("rollout"):
                trajectories, stats = self.driver.trajectories(jobs, state.params, key, timer.notify, state.step)
            batch = self.scored(trajectories, stats, state, timer)
        with timer("gather"):
            return exchange(self.hosts, batch)

    def scored(
        self, trajectories: Sequence[Trajectory], stats: RolloutStats, state: RunState, timer: Timer
    ) -> RolloutBatch:
        """The trajectories of this host, rewarded, and their contexts with advantages."""
        self.driver.engine.release()  # rewards and the update have the memory of the sampler's cache
        with timer("rewards"):
            # One key for all steps: equal memories earn equal rewards.
            key = named_key(self.run.config.seed, "rewards", 0)
            scored = self.reward_fn(trajectories, key, timer.notify, state.params)
        return make_rollout_batch(scored, stats, self.run.config.rl, self.run.config.training.train_on)

    def with_metrics(self, batch: RolloutBatch) -> RolloutBatch:
        """The complete batch of a step with its metrics. Raises RunEnded where an agent's own numbers fail."""
        metrics = self.hosts.agreed(lambda: trajectory_metrics(batch.summaries, self.run.agent))
        metrics |= rollout_metrics(batch.stats)
        mixed = batch.mixed_groups(self.run.config.rl.group_size)
        metrics["frac_mixed_groups"] = sum(mixed) / max(1, len(mixed))
        correct = [example for example in batch.examples if example.correct]
        if correct:
            logprobs = [np.asarray(example.logprobs)[np.asarray(example.sampled)] for example in correct]
            metrics[MetricName.CORRECT_LOGPROB] = float(np.concatenate(logprobs).mean())
        return replace(batch, metrics=metrics)
