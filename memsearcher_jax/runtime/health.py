"""Alarms for metrics that show a run diverging, what follows them, and a stop for steps that teach nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from memsearcher_jax.logs.metric_names import MetricName
from memsearcher_jax.ranges import Count, NonNegative, PositiveFraction, Probability


@dataclass(frozen=True)
class HealthConfig:
    """Limits on a step's metrics. A limit of 0 is off; a value that is not finite exceeds every limit."""

    max_skipped_updates: Count = 8
    """End the run after this many consecutive updates whose gradient is not finite. Its checkpoints are intact."""
    max_unscored: Probability = 0.1
    """Alert when more than this fraction of a step's trajectories is lost to faults of the machinery, such as a search
    service that is down, and end the run after `patience` consecutive such steps, whatever `on_collapse` is; 1: off."""
    min_reward_fraction: Probability = 0.5
    """Alert when mean reward falls below this fraction of its best mean over `reward_window` steps."""
    reward_window: Count = 10
    """Steps over which the best mean reward is taken."""
    min_reward: NonNegative = 0.0
    """Alert when mean reward falls below this."""
    min_entropy: NonNegative = 0.0
    """Alert when mean entropy, in nats, falls below this (the policy is collapsing)."""
    max_entropy: NonNegative = 0.0
    """Alert when mean entropy, in nats, exceeds this (the policy is diverging)."""
    min_tokens_per_turn: NonNegative = 0.0
    """Alert when mean tokens per turn fall below this."""
    max_tokens_per_turn: NonNegative = 0.0
    """Alert when mean tokens per turn exceed this (contexts grow without use)."""
    max_kl: NonNegative = 0.0
    """Alert when the divergence from the initial weights, in nats per token, exceeds this."""
    patience: Count = 3
    """Consecutive steps beyond a limit before the alarm."""
    on_collapse: Literal["warn", "stop", "rollback"] = "warn"
    """What an alarm does: print a line on stderr (warn), end the run (stop), or restore the checkpoint with the best
    evaluation and go on with new problems and a lower learning rate (rollback)."""
    max_rollbacks: Count = 3
    """Rollbacks after which the next alarm ends the run."""
    rollback_lr_factor: PositiveFraction = 0.3
    """Each rollback multiplies the learning rate by this."""


LIMITS = {
    "min_reward": MetricName.REWARD,
    "min_entropy": MetricName.ENTROPY,
    "max_entropy": MetricName.ENTROPY,
    "min_tokens_per_turn": MetricName.TOKENS_PER_TURN,
    "max_tokens_per_turn": MetricName.TOKENS_PER_TURN,
    "max_kl": MetricName.KL,
}


class RunAborted(Exception):
    """The run must not go on; its checkpoints are intact."""


@dataclass
class HealthState:
    """What a monitor remembers of earlier steps: plain JSON, for checkpoints."""

    consecutive_skips: float = 0.0
    consecutive_losses: int = 0
    consecutive_steps: dict[str, int] = field(default_factory=dict)  # by limit, of steps beyond it
    rewards: list[float] = field(default_factory=list)  # of the last `reward_window` steps since the last rollback
    best_mean: float = 0.0  # of `reward_window` steps
    rollbacks: int = 0
    evaluated: int = -1  # training steps before the last evaluation
    best_step: int | None = None  # of the checkpoint with the best evaluation
    best_reward: float | None = None  # in that evaluation


class HealthMonitor:
    """Checks the metrics of each step, in order. `notify` gets each alarm in one line."""

    def __init__(self, config: HealthConfig, notify: Callable[[str], None], state: HealthState | None = None):
        self._config, self._notify = config, notify
        self.state = state or HealthState()
        self.must_roll_back = False  # after the last check

    @property
    def rolls_back(self) -> bool:
        """Whether an alarm needs a checkpoint to restore."""
        return self._config.on_collapse == "rollback"

    def record_evaluation(self, step: int, reward: float) -> None:
        """Records the mean reward of an evaluation of the weights after `step` training steps."""
        state = self.state
        state.evaluated = step
        if math.isfinite(reward) and (state.best_reward is None or reward > state.best_reward):
            state.best_step, state.best_reward = step, reward

    def check(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metric `alarms` of this step: how many limits it exceeds; and `rollbacks` until now, if there may be any.

        Sets `must_roll_back`, and raises RunAborted, where the config says so. Missing metrics never trigger an alarm;
        a value that is not finite exceeds every limit.
        """
        self.must_roll_back = False
        self._check_skipped(step, metrics)
        self._check_unscored(step, metrics.get(MetricName.UNSCORED, 0.0))
        state, exceeded = self.state, dict(self._exceeded(metrics))
        state.consecutive_steps = {limit: state.consecutive_steps.get(limit, 0) + 1 for limit in exceeded}
        for limit, message in exceeded.items():
            if state.consecutive_steps[limit] == self._config.patience:
                self._notify(f"alarm at step {step}: {message}")
                if self._config.on_collapse == "stop":
                    raise RunAborted(f"step {step}: {message}; health.on_collapse is stop")
                self._roll_back(f"step {step}: {message}")
        self._record_reward(metrics.get(MetricName.REWARD, math.nan))
        if self.must_roll_back:
            state.rollbacks += 1
            state.consecutive_skips, state.consecutive_steps, state.rewards = 0.0, {}, []
        return {"alarms": float(len(exceeded))} | ({"rollbacks": float(state.rollbacks)} if self.rolls_back else {})

    def _roll_back(self, message: str) -> None:
        if not self.rolls_back:
            return
        if self.state.best_step is None:
            raise RunAborted(f"{message}; no checkpoint was evaluated that could be restored")
        if self.state.rollbacks == self._config.max_rollbacks:
            raise RunAborted(f"{message}, after {self.state.rollbacks} rollbacks (health.max_rollbacks)")
        self.must_roll_back = True

    def _record_reward(self, reward: float) -> None:
        state, window = self.state, self._config.reward_window
        if math.isfinite(reward):
            state.rewards = [*state.rewards, float(reward)][-window:]
        if len(state.rewards) == window:
            state.best_mean = max(state.best_mean, sum(state.rewards) / window)

    def _check_skipped(self, step: int, metrics: Mapping[str, float]) -> None:
        names = ("skipped_updates", "trailing_skipped_updates", "updates")
        skipped, trailing, updates = (metrics.get(name, 0.0) for name in names)
        state = self.state
        if not skipped:
            state.consecutive_skips = 0.0
            return
        state.consecutive_skips = trailing + (state.consecutive_skips if trailing == updates else 0.0)
        self._notify(f"step {step}: skipped {skipped:.0f} of {updates:.0f} updates: their gradient is not finite")
        if state.consecutive_skips >= self._config.max_skipped_updates:
            message = (
                f"step {step}: {state.consecutive_skips:.0f} consecutive updates had a gradient that is not finite "
                "(health.max_skipped_updates)"
            )
            if not self.rolls_back:
                raise RunAborted(message)
            self._roll_back(message)

    def _check_unscored(self, step: int, unscored: float) -> None:
        if unscored <= self._config.max_unscored:
            self.state.consecutive_losses = 0
            return
        self.state.consecutive_losses += 1
        message = f"step {step}: {unscored:.0%} of the trajectories were lost to faults (health.max_unscored)"
        self._notify(f"alarm at {message}")
        if self.state.consecutive_losses >= self._config.patience:
            raise RunAborted(message)

    def _exceeded(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """(limit, message) of every limit that the metrics exceed."""
        lowest = self._config.min_reward_fraction * self.state.best_mean
        if lowest > 0 and (reward := metrics.get(MetricName.REWARD, math.nan)) < lowest:
            yield (
                "min_reward_fraction",
                f"reward is {reward:.4g}, its best mean over {self._config.reward_window} steps is "
                f"{self.state.best_mean:.4g}, and health.min_reward_fraction {self._config.min_reward_fraction:g}",
            )
        for name, metric in LIMITS.items():
            limit, value = getattr(self._config, name), metrics.get(metric)
            if not limit or value is None:
                continue
            within = value <= limit if name.startswith("max_") else value >= limit
            if not (math.isfinite(value) and within):
                yield name, f"{metric} is {value:.4g} and health.{name} {limit:g}"
