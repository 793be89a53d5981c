"""Alarms and what they do, rollbacks with a target, outages, and consecutive skipped updates."""

import json
import math
from dataclasses import asdict

import pytest

from memsearcher_jax.hosts.ending import EndReason, RunEnded
from memsearcher_jax.rl.config import HealthConfig
from memsearcher_jax.rl.health import WAYS_OUT, HealthMonitor, HealthState
from memsearcher_jax.types import StopReason


def run_checks(config, steps):
    """The messages, and the number of limits that each step exceeds."""
    messages = []
    monitor = HealthMonitor(config, messages.append)
    return messages, [(monitor.check(step, metrics), metrics["alarms"])[1] for step, metrics in enumerate(steps)]


@pytest.mark.parametrize("bad", [4.0, math.nan])
def test_an_alarm_is_reported_every_patience_steps(bad):
    config = HealthConfig(patience=2, max_entropy=3.0)
    values = [bad, 2.0, bad, bad, bad, 2.0, bad, bad, bad, bad]
    messages, counts = run_checks(config, [{"entropy": value} for value in values])
    assert [line.split(":")[0] for line in messages] == [f"alarm at step {step}" for step in (3, 7, 9)]
    assert f"entropy is {bad:.4g} and health.max_entropy 3" in messages[0]
    assert counts == [value is bad for value in values]
    assert run_checks(config, [{"loss": 1.0}] * 5) == ([], [0] * 5)
    assert run_checks(HealthConfig(), [{"entropy": bad}] * 9)[0] == [], "without a limit there is no alarm"


def test_a_fall_of_the_likelihood_of_correct_trajectories_is_an_alarm():
    """Steps without a correct trajectory neither lengthen nor end the series that it is compared with."""
    values = [-0.5, -0.3, None, -0.3, -0.3, -0.9, -0.6, -0.7, -0.8]
    steps = [{} if value is None else {"correct_logprob": value} for value in values]
    messages, counts = run_checks(HealthConfig(max_likelihood_fall=0.35, patience=2), steps)
    assert counts == [0, 0, 0, 0, 0, 1, 0, 1, 1]
    alarm = "alarm at step 8: correct_logprob is -0.8, its best mean over 2 steps is -0.3, and health."
    assert messages == [f"{alarm}max_likelihood_fall 0.35"]
    assert run_checks(HealthConfig(patience=2), steps) == ([], [0] * 9)


@pytest.mark.parametrize("beyond", [4, 7])
def test_on_collapse_stop_ends_the_run_on_an_alarm(beyond):
    """Also where the streak is longer than patience, because the run was resumed with another action."""
    state = HealthState(consecutive_steps={"max_entropy": beyond})
    monitor = HealthMonitor(HealthConfig(max_entropy=0.1, patience=5, on_collapse="stop"), print, state)
    message = r"step 7: entropy is 0\.5 and health.max_entropy 0\.1; health.on_collapse is stop"
    with pytest.raises(RunEnded, match=message) as end:
        monitor.check(7, {"entropy": 0.5})
    assert end.value.reason.weights_are_suspect


def test_lost_trajectories_are_reported_and_then_end_the_run_which_may_be_restarted():
    config = HealthConfig(max_unscored=0.2, patience=2)
    messages, counts = run_checks(config, [{"unscored": share} for share in (0.2, 0.3, 0.1, 0.3)])
    message = "30% of the trajectories were lost to faults (health.max_unscored)"
    assert messages == [f"alarm at step {step}: {message}" for step in (1, 3)] and counts == [0, 1, 0, 1]
    with pytest.raises(RunEnded, match="step 1: 50% of the trajectories were lost to faults") as end:
        run_checks(config, [{"unscored": 0.5}] * 2)
    assert end.value.reason is EndReason.OUTAGE
    assert run_checks(HealthConfig(max_unscored=1.0), [{"unscored": 1.0}] * 9)[0] == []


def skipped_updates(total, updates=4):
    return {"skipped_updates": float(total), "updates": float(updates)}


def test_steps_without_a_finite_gradient_end_the_run():
    """A step without updates neither adds to them nor ends them; one applied update does."""
    config = HealthConfig(patience=2)
    messages, _ = run_checks(config, [skipped_updates(4), skipped_updates(3), skipped_updates(4)])
    assert messages[1] == "step 1: skipped 3 updates: their gradient is not finite" and len(messages) == 3
    many = [skipped_updates(4), {"updates": 0.0}, {"reward": 0.5}, skipped_updates(4)]
    for on_collapse in ("warn", "stop", "rollback"):
        with pytest.raises(RunEnded, match="step 3: no update had a finite gradient in 2 consecutive steps") as end:
            run_checks(HealthConfig(patience=2, on_collapse=on_collapse), many)
        assert not end.value.reason.weights_are_suspect, "they are those of the last update that was applied"


REWARDS = [0.1, 0.6, 0.4, 0.9, 0.24, math.nan, 0.24, 0.26, 0.24, 0.24]  # the best mean of two is 0.65, then 0.57


def test_a_reward_below_a_fraction_of_its_best_mean_is_an_alarm():
    config = HealthConfig(min_reward_fraction=0.4, patience=2)
    messages, counts = run_checks(config, [{"reward": reward} for reward in REWARDS])
    assert counts == [0, 0, 0, 0, 1, 0, 1, 0, 1, 1]
    line = "reward is 0.24, its best mean over 2 steps is 0.65, and health.min_reward_fraction 0.4"
    assert messages == [f"alarm at step 9: {line}"]
    assert not any(run_checks(HealthConfig(min_reward_fraction=0.4), [{"reward": reward} for reward in REWARDS])[1])
    assert not any(run_checks(HealthConfig(patience=1), [{"reward": -1.0}, {"reward": -9.0}])[1])
    off = HealthConfig(min_reward_fraction=0.0, patience=1)
    assert not any(run_checks(off, [{"reward": 0.5}, {"reward": -0.1}])[1])


def guarded(state=None, **changes):
    """A monitor for which a reward of 0.1 is a collapse."""
    state = state or HealthState(best_means={"reward": 1.0})
    config = HealthConfig(on_collapse="rollback", **{"min_reward_fraction": 0.5, "patience": 2} | changes)
    return HealthMonitor(config, lambda line: None, state)


def test_an_alarm_demands_a_bounded_number_of_rollbacks():
    monitor = guarded()
    monitor.record_evaluation(0, {"reward": 0.5})
    decisions = [(monitor.check(step, {"reward": 0.1}), monitor.state.rollbacks) for step in range(7)]
    assert decisions == [(False, 0), (True, 1), (False, 1), (True, 2), (False, 2), (True, 3), (False, 3)]
    with pytest.raises(RunEnded, match=r"step 7: reward is 0\.1, .*, after 3 rollbacks"):
        monitor.check(7, {"reward": 0.1})


def test_an_outage_is_no_collapse():
    """What is left of a step, trajectories that did not search, neither lengthens nor ends a series of bad steps."""
    monitor, outage = guarded(patience=3), {"reward": 0.0, "unscored": 0.9}
    monitor.record_evaluation(0, {"reward": 0.5})
    monitor.record_evaluation(1, {"reward": 0.9, "unscored": 0.9})
    assert (monitor.state.best_step, monitor.state.evaluated) == (0, 1)
    assert not any(monitor.check(step, outage) for step in range(2))
    assert (monitor.state.consecutive_steps, monitor.state.recent) == ({"max_unscored": 2}, {})
    steps = [{"reward": 0.1}, {"reward": 0.1}, {"reward": 0.9, "unscored": 0.9}, {"reward": 0.1}]
    assert [monitor.check(step, metrics) for step, metrics in enumerate(steps, 2)] == [False, False, False, True]


def test_a_rollback_needs_an_evaluated_checkpoint():
    monitor = guarded(patience=1)
    monitor.record_evaluation(0, {"reward": math.nan})
    with pytest.raises(RunEnded, match="no checkpoint was evaluated"):
        monitor.check(0, {"reward": 0.1})
    monitor.record_evaluation(0, {"reward": 0.5})
    assert monitor.check(0, skipped_updates(4)), "updates without a finite gradient demand one, too"
    assert not monitor.check(1, {"reward": 1.0})


def test_the_best_evaluation_counts():
    monitor = guarded()
    for step, reward in enumerate((0.2, 0.6, 0.6, math.nan, 0.4)):
        monitor.record_evaluation(step, {"reward": reward})
    assert (monitor.state.best_step, monitor.state.best_reward, monitor.state.evaluated) == (1, 0.6, 4)
    assert monitor.state.without_rewards() == HealthState(), "rewards of another measure are not compared with these"


def test_a_monitor_goes_on_from_its_state_in_a_checkpoint():
    rewards = [0.9, 0.8, 0.1, 0.4, 0.9, 0.2, 0.1, 0.9]

    def checks(monitor, steps):
        return [monitor.check(step, {"reward": rewards[step]}) for step in steps]

    for stop in range(1, len(rewards)):
        straight, first = guarded(HealthState()), guarded(HealthState())
        for monitor in (straight, first):
            monitor.record_evaluation(0, {"reward": 0.9})
        expected, begun = checks(straight, range(len(rewards))), checks(first, range(stop))
        resumed = guarded(HealthState(**json.loads(json.dumps(asdict(first.state)))))
        assert begun + checks(resumed, range(stop, len(rewards))) == expected
        assert resumed.state == straight.state
    assert expected.count(True) == 2


def test_logits_that_are_not_finite_are_no_outage():
    """They are the policy's doing, also where outages are off; a few of them leave a step to learn from."""
    few = {"unscored": 0.1, "stop/not_finite": 0.1}
    many = {"unscored": 0.3, "stop/not_finite": 0.25}
    for max_unscored in (0.1, 1.0):
        monitor = HealthMonitor(HealthConfig(max_unscored=max_unscored), print)
        assert not monitor.is_outage(few) and not monitor.is_broken(few) and not monitor.check(0, few)
        assert not monitor.is_outage(many) and monitor.is_broken(many)
        with pytest.raises(RunEnded, match="step 1: the policy's logits were not finite in 25% of the tr") as end:
            monitor.check(1, many)
        assert end.value.reason is EndReason.COLLAPSE
    monitor.record_evaluation(2, many | {"reward": 0.9})
    assert monitor.state.best_step is None and monitor.state.evaluated == 2


def test_a_broken_policy_rolls_back_at_most_as_often_as_any_other():
    monitor = guarded(patience=5)
    monitor.record_evaluation(0, {"reward": 0.5})
    broken = {"weights_not_finite": 1.0}
    assert [monitor.check(step, dict(broken)) for step in range(3)] == [True] * 3
    with pytest.raises(RunEnded, match="step 3: the weights are not finite, after 3 rollbacks"):
        monitor.check(3, broken)


def test_steps_that_have_nothing_to_train_on_are_reported():
    """With the commonest stop reason of the last one and a way out, every `patience` steps; it is no alarm."""
    idle = {"updates": 0.0, "stop/cut_off": 0.71, "stop/answered": 0.2}
    messages, alarms = run_checks(HealthConfig(patience=3), [idle] * 2 + [{"updates": 1.0}] + [idle] * 7)
    assert messages == [
        f"step {step}: no update in {count} consecutive steps: in no group do the rewards differ; 71% of the "
        "trajectories ended with cut_off (a generation reached its token limit): raise agent.completion_tokens, or "
        "shorten the templates and the descriptions of tools"
        for step, count in ((5, 3), (8, 6))
    ]
    assert not any(alarms)
    outage = {"updates": 0.0, "unscored": 0.9}
    messages, _ = run_checks(HealthConfig(patience=3), [idle, outage, outage, idle, idle])
    assert sum("no update in 3 consecutive steps" in message for message in messages) == 1, "an outage is no measure"


def test_every_end_of_the_policys_doing_has_a_way_out():
    assert set(WAYS_OUT) == {reason for reason in StopReason if not reason.is_fault}
