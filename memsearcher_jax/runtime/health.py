"""Alarms for metrics that show a run diverging, what follows them, and a stop for steps that teach nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from memsearcher_jax.logs.metric_names import MetricName
from memsearcher_jax.ranges import Count, NonNegative, Probability
from memsearcher_jax.runtime.ending import EndReason, RunEnded

MAX_SKIPPED_UPDATES = 8  # consecutive ones whose gradient is not finite
MAX_ROLLBACKS = 3  # after which the next alarm ends the run
ROLLBACK_LR_FACTOR = 0.3  # by which each rollback multiplies the learning rate


@dataclass(frozen=True)
class HealthConfig:
    """Limits on a step's metrics. A limit of 0 is off; a value that is not finite exceeds every limit."""

    on_collapse: Literal["warn", "stop", "rollback"] = "warn"
    """What an alarm does: print a line on stderr (warn), end the run (stop), or restore the checkpoint with the best
    evaluation and go on with new problems and a lower learning rate (rollback)."""
    patience: Count = 5
    """Consecutive training steps beyond a limit before the alarm, and steps over which the best mean reward is
    taken."""
    min_reward_fraction: Probability = 0.5
    """Alert when mean reward falls below this fraction of its best mean over `patience` steps."""
    max_entropy: NonNegative = 0.0
    """Alert when mean entropy, in nats per token, exceeds this (the policy is diverging)."""
    max_kl: NonNegative = 0.0
    """Alert when the divergence from the initial weights, in nats per token, exceeds this."""
    max_likelihood_fall: NonNegative = 0.0
    """Alert when the mean log-probability of the tokens of correct trajectories is this many nats below its best mean
    over `patience` steps: the earliest sign of a collapse (arXiv 2512.04220)."""
    max_unscored: Probability = 0.1
    """Alert when more than this fraction of a step's trajectories is lost to faults of the machinery, such as a search
    service that is down, and end the run after `patience` consecutive such steps, whatever `on_collapse` is; 1: off."""


LIMITS = {"max_entropy": MetricName.ENTROPY, "max_kl": MetricName.KL}


@dataclass
class HealthState:
    """What a monitor remembers of earlier steps: plain JSON, for checkpoints."""

    consecutive_skips: float = 0.0
    consecutive_losses: int = 0
    consecutive_steps: dict[str, int] = field(default_factory=dict)  # by limit, of steps beyond it
    recent: dict[str, list[float]] = field(default_factory=dict)  # by metric, of `patience` steps since a rollback
    best_means: dict[str, float] = field(default_factory=dict)  # by metric, of `patience` steps
    rollbacks: int = 0
    evaluated: int = -1  # training steps before the last evaluation
    best_step: int | None = None  # of the checkpoint with the best evaluation
    best_reward: float | None = None  # in that evaluation

    def without_rewards(self) -> HealthState:
        """The state for rewards of another measure: none of the earlier ones is compared with."""
        return HealthState(
            self.consecutive_skips, self.consecutive_losses, dict(self.consecutive_steps), rollbacks=self.rollbacks
        )


class HealthMonitor:
    """Checks the metrics of each step, in order. `notify` gets each alarm in one line."""

    def __init__(self, config: HealthConfig, notify: Callable[[str], None], state: HealthState | None = None):
        self._config, self.notify = config, notify
        self.state = state or HealthState()
        self._rate_is_zero = False

    @property
    def rolls_back(self) -> bool:
        """Whether an alarm needs a checkpoint to restore."""
        return self._config.on_collapse == "rollback"

    def is_outage(self, metrics: Mapping[str, float]) -> bool:
        """Whether too many trajectories were lost for the others to be a fair sample of the policy."""
        return metrics.get(MetricName.UNSCORED, 0.0) > self._config.max_unscored

    def record_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records an evaluation of the weights after `step` training steps; faults make it none that is compared.

        Raises RunEnded if it was lost to failing searches: a run that resumes makes it again.
        """
        if (failed := metrics.get("stop/search_failed", 0.0)) > self._config.max_unscored:
            lost = f"{failed:.0%} of the evaluation's trajectories were lost to failing searches (health.max_unscored)"
            raise RunEnded(EndReason.OUTAGE, lost)
        state, reward = self.state, metrics[MetricName.REWARD]
        state.evaluated = step
        better = state.best_reward is None or reward > state.best_reward
        if math.isfinite(reward) and better and not self.is_outage(metrics):
            state.best_step, state.best_reward = step, reward

    def check(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether the run has to roll back. Raises RunEnded where the config says so.

        Missing metrics never trigger an alarm; a value that is not finite exceeds every limit. What an outage leaves of
        a step does not measure the policy: it neither lengthens nor ends a series of steps beyond a limit.
        """
        if metrics.get("learning_rate") == 0 and not self._rate_is_zero:
            self._rate_is_zero = True
            self.notify(f"step {step}: the learning rate is 0 from now on (training.decay_steps): nothing is learned")
        must_roll_back = self._check_skipped(step, metrics)
        if not self._check_outage(step, metrics):
            must_roll_back = self._check_limits(step, metrics) or must_roll_back
            self._update_means(metrics)
        if must_roll_back:
            state = self.state
            state.rollbacks += 1
            state.consecutive_skips, state.consecutive_steps, state.recent = 0.0, {}, {}
            self.notify(f"step {step}: rollback to the checkpoint of step {state.best_step}")
        return must_roll_back

    def alarms(self, metrics: Mapping[str, float]) -> int:
        """How many limits the metrics of a step exceed."""
        return len(dict(self._exceeded(metrics)))

    @property
    def _can_roll_back(self) -> bool:
        return self.rolls_back and self.state.best_step is not None and self.state.rollbacks < MAX_ROLLBACKS

    def _check_skipped(self, step: int, metrics: Mapping[str, float]) -> bool:
        names = ("skipped_updates", "trailing_skipped_updates", "updates")
        skipped, trailing, updates = (metrics.get(name, 0.0) for name in names)
        state = self.state
        if not updates:
            return False
        if not skipped:
            state.consecutive_skips = 0.0
            return False
        state.consecutive_skips = trailing + (state.consecutive_skips if trailing == updates else 0.0)
        self.notify(f"step {step}: skipped {skipped:.0f} of {updates:.0f} updates: their gradient is not finite")
        if state.consecutive_skips < MAX_SKIPPED_UPDATES:
            return False
        message = f"step {step}: {state.consecutive_skips:.0f} consecutive updates had a gradient that is not finite"
        # Skipped updates leave the weights as they were, so these are not suspect.
        if not self._can_roll_back:
            raise RunEnded(EndReason.FAILURE, message)
        return True

    def _check_outage(self, step: int, metrics: Mapping[str, float]) -> bool:
        if not self.is_outage(metrics):
            self.state.consecutive_losses = 0
            return False
        self.state.consecutive_losses += 1
        unscored = metrics[MetricName.UNSCORED]
        message = f"step {step}: {unscored:.0%} of the trajectories were lost to faults (health.max_unscored)"
        self.notify(f"alarm at {message}")
        if self.state.consecutive_losses >= self._config.patience:
            raise RunEnded(EndReason.OUTAGE, message)
        return True

    def _check_limits(self, step: int, metrics: Mapping[str, float]) -> bool:
        state, patience, exceeded = self.state, self._config.patience, dict(self._exceeded(metrics))
        state.consecutive_steps = {limit: state.consecutive_steps.get(limit, 0) + 1 for limit in exceeded}
        lasting = [limit for limit, beyond in state.consecutive_steps.items() if beyond >= patience]
        for limit in lasting:
            message = exceeded[limit]
            if state.consecutive_steps[limit] % patience == 0:
                self.notify(f"alarm at step {step}: {message}")
            if self._config.on_collapse == "stop":
                raise RunEnded(EndReason.COLLAPSE, f"step {step}: {message}; health.on_collapse is stop")
            if self.rolls_back and not self._can_roll_back:
                never = "; no checkpoint was evaluated that could be restored"
                why = never if state.best_step is None else f", after {state.rollbacks} rollbacks"
                raise RunEnded(EndReason.COLLAPSE, f"step {step}: {message}{why}")
        return self.rolls_back and bool(lasting)

    def _update_means(self, metrics: Mapping[str, float]) -> None:
        state, patience = self.state, self._config.patience
        for metric in (MetricName.REWARD, MetricName.CORRECT_LOGPROB):
            if math.isfinite(value := metrics.get(metric, math.nan)):
                recent = state.recent[metric] = [*state.recent.get(metric, []), float(value)][-patience:]
                if len(recent) == patience:
                    mean = sum(recent) / patience
                    state.best_means[metric] = max(mean, state.best_means.get(metric, mean))

    def _exceeded(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """(limit, message) of every limit that the metrics exceed."""
        config, best = self._config, self.state.best_means
        reward, likelihood = best.get(MetricName.REWARD, 0.0), best.get(MetricName.CORRECT_LOGPROB)
        lowest: list[tuple[str, str, float]] = []
        if reward > 0 and not math.isnan(metrics.get(MetricName.REWARD, math.nan)):
            lowest += [("min_reward_fraction", MetricName.REWARD, config.min_reward_fraction * reward)]
        if config.max_likelihood_fall and likelihood is not None:
            lowest += [("max_likelihood_fall", MetricName.CORRECT_LOGPROB, likelihood - config.max_likelihood_fall)]
        for name, metric, bound in lowest:
            if not (value := metrics.get(metric, bound)) >= bound:  # NaN is below it, too
                mean = f"its best mean over {config.patience} steps is {best[metric]:.4g}"
                yield name, f"{metric} is {value:.4g}, {mean}, and health.{name} {getattr(config, name):g}"
        for name, metric in LIMITS.items():
            limit, value = getattr(config, name), metrics.get(metric)
            if limit and value is not None and not value <= limit:  # NaN is beyond it, too
                yield name, f"{metric} is {value:.4g} and health.{name} {limit:g}"
