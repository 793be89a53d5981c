"""Alarms for metrics that show a run diverging, what follows them, and a stop for steps that teach nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from memsearcher_jax.hosts.ending import EndReason, RunEnded
from memsearcher_jax.logs.metric_names import MetricName
from memsearcher_jax.rl.config import HealthConfig

MAX_ROLLBACKS = 3  # after which the next alarm ends the run
ROLLBACK_LR_FACTOR = 0.3  # by which each rollback multiplies the learning rate

# Besides the names of limits in HealthConfig, what `HealthState.consecutive_steps` counts:
LOST = "max_unscored"  # steps that lost more than `health.max_unscored` of their trajectories
SKIPPED = "skipped_updates"  # steps all of whose updates were skipped


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
        self._config = config
        self.notify = notify
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
        failed = metrics.get("stop/search_failed", 0.0)
        if failed > self._config.max_unscored:
            lost = f"{failed:.0%} of the evaluation's trajectories were lost to failing searches (health.max_unscored)"
            raise RunEnded(EndReason.OUTAGE, lost)
        state = self.state
        reward = metrics[MetricName.REWARD]
        state.evaluated = step
        is_better = state.best_reward is None or reward > state.best_reward
        if math.isfinite(reward) and is_better and not self.is_outage(metrics):
            state.best_step = step
            state.best_reward = reward

    def check(self, step: int, metrics: dict[str, float]) -> bool:
        """Whether the run has to roll back; adds the metric `alarms`. Raises RunEnded where the config says so.

        Missing metrics never trigger an alarm; a value that is not finite exceeds every limit. What an outage leaves of
        a step does not measure the policy: it neither lengthens nor ends a series of steps beyond a limit.
        """
        skipped = metrics.get("skipped_updates", 0.0)
        if skipped:
            self.notify(f"step {step}: skipped {skipped:.0f} updates: their gradient is not finite")
        beyond = self._exceeded(metrics)
        metrics["alarms"] = float(len(beyond.keys() - {SKIPPED}))
        if not self.is_outage(metrics):
            self._update_means(metrics)
        self._count(beyond, metrics)
        must_roll_back = False
        for limit, message in beyond.items():
            count = self.state.consecutive_steps[limit]
            is_alarm_due = limit != SKIPPED and count % self._config.patience == 0
            if limit == LOST or is_alarm_due:
                self.notify(f"alarm at step {step}: {message}")
            if count >= self._config.patience:
                self._end(limit, f"step {step}: {message}")
                must_roll_back = must_roll_back or self.rolls_back
        if must_roll_back:
            self.state.rollbacks += 1
            self.state.consecutive_steps = {}
            self.state.recent = {}
            self.notify(f"step {step}: rollback to the checkpoint of step {self.state.best_step}")
        return must_roll_back

    def _count(self, beyond: Iterable[str], metrics: Mapping[str, float]) -> None:
        """Lengthens the series of steps beyond these limits, and ends the others, except where the step is no measure.

        A step without updates does not measure SKIPPED; a step of an outage measures only LOST.
        """
        counts = {}
        for limit, count in self.state.consecutive_steps.items():
            has_no_updates = limit == SKIPPED and not metrics.get("updates")
            is_lost = limit != LOST and self.is_outage(metrics)
            if has_no_updates or is_lost:
                counts[limit] = count
        for limit in beyond:
            counts[limit] = self.state.consecutive_steps.get(limit, 0) + 1
        self.state.consecutive_steps = counts

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
        """Takes the step's reward and likelihood into the best means over `patience` steps."""
        state = self.state
        patience = self._config.patience
        for metric in (MetricName.REWARD, MetricName.CORRECT_LOGPROB):
            value = metrics.get(metric, math.nan)
            if not math.isfinite(value):
                continue
            recent = [*state.recent.get(metric, []), float(value)][-patience:]
            state.recent[metric] = recent
            if len(recent) == patience:
                mean = sum(recent) / patience
                state.best_means[metric] = max(mean, state.best_means.get(metric, mean))

    def _exceeded(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """By limit, the message of every one that the metrics exceed."""
        exceeded = dict[str, str]()
        is_outage = self.is_outage(metrics)
        if is_outage:
            lost = metrics[MetricName.UNSCORED]
            exceeded[LOST] = f"{lost:.0%} of the trajectories were lost to faults (health.{LOST})"
        updates = metrics.get("updates")
        if updates and metrics.get("skipped_updates") == updates:
            exceeded[SKIPPED] = f"no update had a finite gradient in {self._config.patience} consecutive steps"
        if is_outage:
            return exceeded
        self._check_reward(metrics, exceeded)
        self._check_likelihood(metrics, exceeded)
        self._check_entropy(metrics, exceeded)
        return exceeded

    def _check_reward(self, metrics: Mapping[str, float], exceeded: dict[str, str]) -> None:
        fraction = self._config.min_reward_fraction
        best = self.state.best_means.get(MetricName.REWARD, 0.0)
        reward = metrics.get(MetricName.REWARD, math.nan)
        if fraction and best > 0 and reward < fraction * best:  # NaN, a step without rewards, is none
            exceeded["min_reward_fraction"] = self._fall(MetricName.REWARD, reward, best, "min_reward_fraction")

    def _check_likelihood(self, metrics: Mapping[str, float], exceeded: dict[str, str]) -> None:
        fall = self._config.max_likelihood_fall
        best = self.state.best_means.get(MetricName.CORRECT_LOGPROB)
        likelihood = metrics.get(MetricName.CORRECT_LOGPROB)
        if not fall or best is None or likelihood is None:
            return
        if not likelihood >= best - fall:  # NaN is below it, too
            message = self._fall(MetricName.CORRECT_LOGPROB, likelihood, best, "max_likelihood_fall")
            exceeded["max_likelihood_fall"] = message

    def _fall(self, metric: str, value: float, best: float, limit: str) -> str:
        mean = f"its best mean over {self._config.patience} steps is {best:.4g}"
        return f"{metric} is {value:.4g}, {mean}, and health.{limit} {getattr(self._config, limit):g}"

    def _check_entropy(self, metrics: Mapping[str, float], exceeded: dict[str, str]) -> None:
        limit = self._config.max_entropy
        entropy = metrics.get(MetricName.ENTROPY)
        if limit and entropy is not None and not entropy <= limit:  # NaN is beyond it, too
            exceeded["max_entropy"] = f"{MetricName.ENTROPY} is {entropy:.4g} and health.max_entropy {limit:g}"
