"""Alarms for metrics that show a run diverging, and a stop for steps that teach nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from memsearcher_jax.ranges import Count, NonNegative, Probability
from memsearcher_jax.report.metric_names import MetricName


@dataclass(frozen=True)
class HealthConfig:
    """Limits on a step's metrics. A limit of 0 is off; a value that is not finite exceeds every limit."""

    max_skipped_updates: Count = 8
    """End the run after this many consecutive updates whose gradient is not finite. Its checkpoints are intact."""
    max_unscored: Probability = 0.1
    """Alert when more than this fraction of a step's trajectories is lost to faults of the machinery, such as a search
    service that is down, and end the run after `patience` consecutive such steps, whatever `action` is; 1: off."""
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
    action: Literal["warn", "stop"] = "warn"
    """What an alarm does: print a line on stderr, or end the run."""


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


class HealthMonitor:
    """Checks the metrics of each step, in order. `notify` gets each alarm in one line."""

    def __init__(self, config: HealthConfig, notify: Callable[[str], None]):
        self._config, self._notify = config, notify
        self._consecutive_skips = 0.0
        self._consecutive_losses = 0
        self._consecutive_steps: dict[str, int] = {}  # by limit, of steps beyond it

    def check(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metric `alarms` of this step: how many limits it exceeds. Raises RunAborted where the config says so.

        Missing metrics never trigger an alarm; a value that is not finite exceeds every limit.
        """
        self._check_skipped(step, metrics)
        self._check_unscored(step, metrics.get(MetricName.UNSCORED, 0.0))
        exceeded = dict(self._exceeded(metrics))
        self._consecutive_steps = {limit: self._consecutive_steps.get(limit, 0) + 1 for limit in exceeded}
        for limit, message in exceeded.items():
            if self._consecutive_steps[limit] == self._config.patience:
                self._notify(f"alarm at step {step}: {message}")
                if self._config.action == "stop":
                    raise RunAborted(f"step {step}: {message}; health.action is stop")
        return {"alarms": float(len(exceeded))}

    def _check_skipped(self, step: int, metrics: Mapping[str, float]) -> None:
        names = ("skipped_updates", "trailing_skipped_updates", "updates")
        skipped, trailing, updates = (metrics.get(name, 0.0) for name in names)
        if not skipped:
            self._consecutive_skips = 0.0
            return
        self._consecutive_skips = trailing + (self._consecutive_skips if trailing == updates else 0.0)
        self._notify(f"step {step}: skipped {skipped:.0f} of {updates:.0f} updates: their gradient is not finite")
        if self._consecutive_skips >= self._config.max_skipped_updates:
            raise RunAborted(
                f"step {step}: {self._consecutive_skips:.0f} consecutive updates had a gradient that is not finite "
                "(health.max_skipped_updates)"
            )

    def _check_unscored(self, step: int, unscored: float) -> None:
        if unscored <= self._config.max_unscored:
            self._consecutive_losses = 0
            return
        self._consecutive_losses += 1
        message = f"step {step}: {unscored:.0%} of the trajectories were lost to faults (health.max_unscored)"
        self._notify(f"alarm at {message}")
        if self._consecutive_losses >= self._config.patience:
            raise RunAborted(message)

    def _exceeded(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """(limit, message) of every limit that the metrics exceed."""
        for name, metric in LIMITS.items():
            limit, value = getattr(self._config, name), metrics.get(metric)
            if not limit or value is None:
                continue
            within = value <= limit if name.startswith("max_") else value >= limit
            if not (math.isfinite(value) and within):
                yield name, f"{metric} is {value:.4g} and health.{name} {limit:g}"
