"""Alarms for metrics that show a run diverging, what follows them, and a stop for steps that teach nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from memsearcher_jax.hosts.ending import EndReason, RunEnded
from memsearcher_jax.logs.metric_names import MetricName
from memsearcher_jax.rl.config import HealthConfig
from memsearcher_jax.rl.metrics import STOP_PREFIX
from memsearcher_jax.types import StopReason

MAX_ROLLBACKS = 3  # after which the next alarm ends the run
ROLLBACK_LR_FACTOR = 0.3  # by which each rollback multiplies the learning rate

MAX_NOT_FINITE = 0.1
"""Fraction of a step's trajectories; where more end because the logits are not finite, the policy is broken."""

WEIGHTS_NOT_FINITE = "weights_not_finite"  # a metric, 1 after an update that made them so; else absent
_NOT_FINITE = f"{STOP_PREFIX}{StopReason.NOT_FINITE.value}"

# Besides the names of limits in HealthConfig, what `HealthState.consecutive_steps` counts:
LOST = "max_unscored"  # steps that lost more than `health.max_unscored` of their trajectories
SKIPPED = "skipped_updates"  # steps all of whose updates were skipped
IDLE = "no_updates"  # steps that had nothing to train on

WAYS_OUT = {
    StopReason.ANSWERED: "choose easier or harder problems, or a reward that has more values, or raise rl.group_size",
    StopReason.STREAM_READ: "choose other streams, or a reward that has more values, or raise rl.group_size",
    StopReason.NO_ANSWER: "show the format in the prompt, or begin with weights that know it (launch/sft.py)",
    StopReason.MAX_TURNS: "raise agent.max_turns, or begin with weights that answer (launch/sft.py)",
    StopReason.CUT_OFF: "raise agent.completion_tokens, or shorten the templates and the descriptions of tools",
    StopReason.FORGED_TURN: "begin with weights that know the chat template (launch/sft.py)",
    StopReason.BAD_MEMORY: "show the format in the prompt, or begin with weights that know it (launch/sft.py)",
    StopReason.CONTEXT_FULL: "raise sampling.context_tokens, or lower agent.observation_tokens",
}
"""By the commonest stop reason, what may give the trajectories of a group different rewards."""


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
        """Whether too many trajectories were lost for the others to be a fair sample of the policy.

        Logits that are not finite are no fault of the machinery: see `is_broken`.
        """
        lost = metrics.get(MetricName.UNSCORED, 0.0) - metrics.get(_NOT_FINITE, 0.0)
        return lost > self._config.max_unscored

    def is_broken(self, metrics: Mapping[str, float]) -> bool:
        """Whether the weights, or the logits of too many trajectories, are not finite."""
        return bool(metrics.get(WEIGHTS_NOT_FINITE)) or self.has_broken_logits(metrics)

    def has_broken_logits(self, metrics: Mapping[str, float]) -> bool:
        """Whether the policy that sampled the trajectories is broken, also where its weights are finite."""
        return metrics.get(_NOT_FINITE, 0.0) > MAX_NOT_FINITE

    def record_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records an evaluation of the weights after `step` training steps.

        It is not compared with others where it lost trajectories to faults, or where the policy is broken.

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
        is_measured = math.isfinite(reward) and not self.is_outage(metrics) and not self.is_broken(metrics)
        if is_measured and is_better:
            state.best_step = step
            state.best_reward = reward

    def check(self, step: int, metrics: dict[str, float]) -> bool:
        """Whether the run has to roll back; adds the metric `alarms`. Raises RunEnded where the config says so.

        Missing metrics never trigger an alarm; a value that is not finite exceeds every limit. What an outage leaves of
        a step does not measure the policy: it neither lengthens nor ends a series of steps beyond a limit. A broken
        policy rolls back at once, or ends the run as a collapse, whatever `on_collapse` is.
        """
        skipped = metrics.get("skipped_updates", 0.0)
        if skipped:
            self.notify(f"step {step}: skipped {skipped:.0f} updates: their gradient is not finite")
        if self.is_broken(metrics):
            metrics["alarms"] = 1.0
            return self.recover(f"step {step}", metrics)
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
            self._begin_rollback(f"step {step}")
        else:
            self._report_idleness(step, metrics)
        return must_roll_back

    def recover(self, when: str, metrics: Mapping[str, float]) -> bool:
        """True, for a rollback from a broken policy. Raises RunEnded, a collapse, where none is possible."""
        if metrics.get(WEIGHTS_NOT_FINITE):
            message = f"{when}: the weights are not finite"
        else:
            share = metrics[_NOT_FINITE]
            message = f"{when}: the policy's logits were not finite in {share:.0%} of the trajectories"
        if not self._can_roll_back:
            raise RunEnded(EndReason.COLLAPSE, message + self._why_no_rollback())
        self.notify(f"alarm at {message}")
        self._begin_rollback(when)
        return True

    def _begin_rollback(self, when: str) -> None:
        self.state.rollbacks += 1
        self.state.consecutive_steps = {}
        self.state.recent = {}
        self.notify(f"{when}: rollback to the checkpoint of step {self.state.best_step}")

    def _report_idleness(self, step: int, metrics: Mapping[str, float]) -> None:
        """A note every `patience` steps without an update: rewards that never differ teach nothing."""
        count = self.state.consecutive_steps.get(IDLE, 0)
        is_due = count > 0 and count % self._config.patience == 0
        if not is_due or not _is_idle(metrics) or self.is_outage(metrics):
            return
        shares = {reason: metrics.get(f"{STOP_PREFIX}{reason.value}", 0.0) for reason in StopReason}
        commonest = max(StopReason, key=lambda reason: shares[reason])
        message = f"step {step}: no update in {count} consecutive steps: in no group do the rewards differ"
        if shares[commonest]:
            message += f"; {shares[commonest]:.0%} of the trajectories ended with {commonest.value}"
            message += f" ({commonest.description})"
        if commonest in WAYS_OUT:
            message += f": {WAYS_OUT[commonest]}"
        self.notify(message)

    def _count(self, beyond: Iterable[str], metrics: Mapping[str, float]) -> None:
        """Lengthens the series of steps beyond these limits, and ends the others, except where the step is no measure.

        A step without updates does not measure SKIPPED; a step of an outage measures only LOST.
        """
        counts = dict[str, int]()
        for limit, count in self.state.consecutive_steps.items():
            has_no_updates = limit == SKIPPED and not metrics.get("updates")
            is_lost = limit != LOST and self.is_outage(metrics)
            if has_no_updates or is_lost:
                counts[limit] = count
        lengthened = list(beyond)
        if _is_idle(metrics) and not self.is_outage(metrics):
            lengthened.append(IDLE)
        for limit in lengthened:
            counts[limit] = self.state.consecutive_steps.get(limit, 0) + 1
        self.state.consecutive_steps = counts

    def _end(self, limit: str, message: str) -> None:
        """Raises RunEnded where `patience` steps beyond this limit end the run."""
        if limit == LOST:
            raise RunEnded(EndReason.OUTAGE, message)
        if self._can_roll_back:
            return
        if limit == SKIPPED:  # skipped updates leave the weights as they were, so these are not suspect
            raise RunEnded(EndReason.FAILURE, message)
        if self._config.on_collapse != "warn":
            raise RunEnded(EndReason.COLLAPSE, message + self._why_no_rollback())

    @property
    def _can_roll_back(self) -> bool:
        return self.rolls_back and self.state.best_step is not None and self.state.rollbacks < MAX_ROLLBACKS

    def _why_no_rollback(self) -> str:
        if not self.rolls_back:
            return f"; health.on_collapse is {self._config.on_collapse}"
        if self.state.best_step is None:
            return "; no checkpoint was evaluated that could be restored"
        return f", after {self.state.rollbacks} rollbacks"

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


def _is_idle(metrics: Mapping[str, float]) -> bool:
    """Whether the step had nothing to train on."""
    return metrics.get("updates") == 0
