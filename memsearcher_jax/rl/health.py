"""Alarms for metrics that show a run diverging, what follows them, and a stop for steps that teach nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from memsearcher_jax.hosts.ending import EndReason, RunEnded
from memsearcher_jax.logs.metric_names import MetricName
from memsearcher_jax.rl.config import HealthConfig

MAX_ROLLBACKS = 3  # after which the next alarm ends the run
ROLLBACK_LR_FACTOR = 0.3  # by which each rollback multiplies the learning rate


LOST, SKIPPED = "max_unscored", "skipped_updates"  # steps whose trajectories, or all of whose updates, were lost


@dataclass
class HealthState:
    """What a monitor remembers of earlier steps: plain JSON, for checkpoints."""

    consecutive_steps: dict[str, int] = field(default_factory=dict)  # by limit, LOST and SKIPPED, of steps beyond it
    recent: dict[str, list[float]] = field(default_factory=dict)  # by metric, of `patience` steps since a rollback
    best_means: dict[str, float] = field(default_factory=dict)  # by metric, of `patience` steps
    rollbacks: int = 0
    evaluated: int = -1  # training steps before the last evaluation
    best_step: int | None = None  # of the checkpoint with the best evaluation
    best_reward: float | None = None  # in that evaluation

    def without_rewards(self) -> HealthState:
        """The state for rewards of another measure: none of the earlier ones is compared with."""
        return HealthState(dict(self.consecutive_steps), rollbacks=self.rollbacks)


class HealthMonitor:
    """Checks the metrics of each step, in order. `notify` gets each alarm in one line."""

    def __init__(self, config: HealthConfig, notify: Callable[[str], None], state: HealthState | None = None):
        self._config, self.notify = config, notify
        self.state = state or HealthState()

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

    def check(self, step: int, metrics: dict[str, float]) -> bool:
        """Whether the run has to roll back; adds the metric `alarms`. Raises RunEnded where the config says so.

        Missing metrics never trigger an alarm; a value that is not finite exceeds every limit. What an outage leaves of
        a step does not measure the policy: it neither lengthens nor ends a series of steps beyond a limit.
        """
        if skipped := metrics.get("skipped_updates", 0.0):
            self.notify(f"step {step}: skipped {skipped:.0f} updates: their gradient is not finite")
        beyond: dict[str, str] = {}
        if lost := self.is_outage(metrics):
            beyond[LOST] = f"{metrics[MetricName.UNSCORED]:.0%} of the trajectories were lost to faults (health.{LOST})"
        if (updates := metrics.get("updates")) and skipped == updates:
            beyond[SKIPPED] = f"no update had a finite gradient in {self._config.patience} consecutive steps"
        if not lost:
            beyond |= self._exceeded(metrics)
            self._update_means(metrics)
        metrics["alarms"] = float(len(beyond.keys() - {SKIPPED}))
        state, must_roll_back = self.state, False
        unmeasured = set() if updates else {SKIPPED}
        if lost:
            unmeasured |= state.consecutive_steps.keys() - {LOST}
        kept = {limit: count for limit, count in state.consecutive_steps.items() if limit in unmeasured}
        state.consecutive_steps = kept | {limit: state.consecutive_steps.get(limit, 0) + 1 for limit in beyond}
        for limit, message in beyond.items():
            count = state.consecutive_steps[limit]
            if limit == LOST or (limit != SKIPPED and count % self._config.patience == 0):
                self.notify(f"alarm at step {step}: {message}")
            if count >= self._config.patience:
                self._end(limit, f"step {step}: {message}")
                must_roll_back = must_roll_back or self.rolls_back
        if must_roll_back:
            state.rollbacks += 1
            state.consecutive_steps, state.recent = {}, {}
            self.notify(f"step {step}: rollback to the checkpoint of step {state.best_step}")
        return must_roll_back

    def _end(self, limit: str, message: str) -> None:
        """Raises RunEnded where `patience` steps beyond this limit end the run."""
        if limit == LOST:
            raise RunEnded(EndReason.OUTAGE, message)
        if self.rolls_back and self.state.best_step is not None and self.state.rollbacks < MAX_ROLLBACKS:
            return
        if limit == SKIPPED:  # skipped updates leave the weights as they were, so these are not suspect
            raise RunEnded(EndReason.FAILURE, message)
        if self._config.on_collapse == "stop":
            raise RunEnded(EndReason.COLLAPSE, f"{message}; health.on_collapse is stop")
        if self.rolls_back:
            never = "; no checkpoint was evaluated that could be restored"
            why = never if self.state.best_step is None else f", after {self.state.rollbacks} rollbacks"
            raise RunEnded(EndReason.COLLAPSE, f"{message}{why}")

    def _update_means(self, metrics: Mapping[str, float]) -> None:
        state, patience = self.state, self._config.patience
        for metric in (MetricName.REWARD, MetricName.CORRECT_LOGPROB):
            if math.isfinite(value := metrics.get(metric, math.nan)):
                recent = state.recent[metric] = [*state.recent.get(metric, []), float(value)][-patience:]
                if len(recent) == patience:
                    mean = sum(recent) / patience
                    state.best_means[metric] = max(mean, state.best_means.get(metric, mean))

    def _exceeded(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """The message of every limit that the metrics exceed."""
        config, best, beyond = self._config, self.state.best_means, dict[str, str]()
        reward, likelihood = best.get(MetricName.REWARD, 0.0), best.get(MetricName.CORRECT_LOGPROB)
        lowest: list[tuple[str, str, float]] = []
        if config.min_reward_fraction and reward > 0 and not math.isnan(metrics.get(MetricName.REWARD, math.nan)):
            lowest += [("min_reward_fraction", MetricName.REWARD, config.min_reward_fraction * reward)]
        if config.max_likelihood_fall and likelihood is not None:
            lowest += [("max_likelihood_fall", MetricName.CORRECT_LOGPROB, likelihood - config.max_likelihood_fall)]
        for name, metric, bound in lowest:
            if not (value := metrics.get(metric, bound)) >= bound:  # NaN is below it, too
                mean = f"its best mean over {config.patience} steps is {best[metric]:.4g}"
                beyond[name] = f"{metric} is {value:.4g}, {mean}, and health.{name} {getattr(config, name):g}"
        limit, entropy = config.max_entropy, metrics.get(MetricName.ENTROPY)
        if limit and entropy is not None and not entropy <= limit:  # NaN is beyond it, too
            beyond["max_entropy"] = f"{MetricName.ENTROPY} is {entropy:.4g} and health.max_entropy {limit:g}"
        return beyond
