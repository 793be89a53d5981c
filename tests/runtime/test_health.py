"""Alarms are reported after `patience` steps, and consecutive skipped updates abort a run."""

import json
import math
from dataclasses import asdict

import pytest

from memsearcher_jax.runtime.health import HealthConfig, HealthMonitor, HealthState, RunAborted


def run_checks(config, steps):
    """The messages, and the number of active alarms at each step."""
    messages = []
    monitor = HealthMonitor(config, messages.append)
    return messages, [monitor.check(step, metrics)["alarms"] for step, metrics in enumerate(steps)]


@pytest.mark.parametrize(
    ("limit", "metric", "good", "bad"),
    [
        ({"min_reward": 0.2}, "reward", 0.2, 0.1),
        ({"min_entropy": 0.5}, "entropy", 0.6, 0.4),
        ({"max_entropy": 3.0}, "entropy", 2.0, 4.0),
        ({"min_tokens_per_turn": 50.0}, "tokens_per_turn", 60.0, 40.0),
        ({"max_tokens_per_turn": 500.0}, "tokens_per_turn", 400.0, 501.0),
        ({"max_kl": 0.1}, "kl", 0.01, 0.2),
        ({"max_kl": 0.1}, "kl", 0.01, math.nan),
    ],
)
def test_an_alarm_is_reported_once_after_patience_steps(limit, metric, good, bad):
    config = HealthConfig(patience=2, **limit)
    values = [bad, good, bad, bad, bad, good, bad, bad]
    messages, counts = run_checks(config, [{metric: value} for value in values])
    assert [line.split(":")[0] for line in messages] == ["alarm at step 3", "alarm at step 7"]
    (name,) = limit
    assert f"{metric} is {bad:.4g} and health.{name}" in messages[0]
    assert counts == [float(value is bad) for value in values]
    assert run_checks(config, [{"loss": 1.0}] * 5) == ([], [0.0] * 5)


def test_there_is_no_alarm_without_limits():
    assert run_checks(HealthConfig(), [{"reward": math.nan, "kl": 1e9, "entropy": 0.0}] * 9)[0] == []


def test_on_collapse_stop_aborts_the_run_on_an_alarm():
    config = HealthConfig(max_kl=0.1, patience=3, on_collapse="stop")
    with pytest.raises(RunAborted, match=r"step 2: kl is 0\.5 and health.max_kl 0\.1; health.on_collapse is stop"):
        run_checks(config, [{"kl": 0.5}] * 3)


def test_lost_trajectories_are_reported_and_then_end_the_run():
    config = HealthConfig(max_unscored=0.2, patience=2)
    messages, _ = run_checks(config, [{"unscored": share} for share in (0.2, 0.3, 0.1, 0.3)])
    message = "30% of the trajectories were lost to faults (health.max_unscored)"
    assert messages == [f"alarm at step {step}: {message}" for step in (1, 3)]
    with pytest.raises(RunAborted, match="step 1: 50% of the trajectories were lost to faults"):
        run_checks(config, [{"unscored": 0.5}] * 2)
    assert run_checks(HealthConfig(max_unscored=1.0), [{"unscored": 1.0}] * 9)[0] == []


def skipped_updates(total, trailing, updates=4):
    return {"skipped_updates": float(total), "trailing_skipped_updates": float(trailing), "updates": float(updates)}


def test_consecutive_skipped_updates_abort_the_run_across_steps():
    config = HealthConfig(max_skipped_updates=6)
    messages, _ = run_checks(
        config, [skipped_updates(3, 2), skipped_updates(3, 0), skipped_updates(0, 0), skipped_updates(3, 3)]
    )
    assert messages[0] == "step 0: skipped 3 of 4 updates: their gradient is not finite"
    assert len(messages) == 3
    with pytest.raises(RunAborted, match="step 1: 7 consecutive updates had a gradient that is not finite"):
        run_checks(config, [skipped_updates(3, 3), skipped_updates(4, 4)])
    run_checks(config, [skipped_updates(3, 3), skipped_updates(3, 3)])  # an update between them was applied


REWARDS = [0.1, 0.6, 0.4, 0.9, 0.24, math.nan, 0.24, 0.26, 0.24, 0.24]  # the best mean of two is 0.65, then 0.57


def test_a_reward_below_a_fraction_of_its_best_mean_is_an_alarm():
    config = HealthConfig(min_reward_fraction=0.4, reward_window=2, patience=2)
    messages, counts = run_checks(config, [{"reward": reward} for reward in REWARDS])
    assert counts == [0, 0, 0, 0, 1, 0, 1, 0, 1, 1]
    assert messages == [
        "alarm at step 9: reward is 0.24, its best mean over 2 steps is 0.65, and health.min_reward_fraction 0.4"
    ]
    assert not any(run_checks(HealthConfig(min_reward_fraction=0.4), [{"reward": reward} for reward in REWARDS])[1])
    assert not any(run_checks(HealthConfig(reward_window=1), [{"reward": -1.0}, {"reward": -9.0}])[1])


def guarded(state=None, **changes):
    config = {"min_reward": 0.5, "patience": 2, "max_rollbacks": 2, "max_skipped_updates": 3} | changes
    return HealthMonitor(HealthConfig(on_collapse="rollback", **config), lambda line: None, state)


def test_an_alarm_demands_a_bounded_number_of_rollbacks():
    monitor, decisions = guarded(), []
    monitor.record_evaluation(0, 0.5)
    for step in range(5):
        metrics = monitor.check(step, {"reward": 0.1})
        decisions.append((monitor.must_roll_back, metrics["rollbacks"]))
    assert decisions == [(False, 0), (True, 1), (False, 1), (True, 2), (False, 2)]
    with pytest.raises(RunAborted, match=r"step 5: reward is 0\.1 .*, after 2 rollbacks \(health.max_rollbacks\)"):
        monitor.check(5, {"reward": 0.1})


def test_updates_without_a_finite_gradient_demand_a_rollback():
    monitor = guarded()
    monitor.record_evaluation(0, 0.5)
    monitor.check(0, skipped_updates(4, 4))
    assert monitor.must_roll_back
    monitor.check(1, {"reward": 1.0})
    assert not monitor.must_roll_back


def test_without_an_evaluated_checkpoint_a_collapse_ends_the_run():
    monitor = guarded(patience=1)
    monitor.record_evaluation(0, math.nan)
    with pytest.raises(RunAborted, match="no checkpoint was evaluated"):
        monitor.check(0, {"reward": 0.1})


def test_the_best_evaluation_counts():
    monitor = guarded()
    for step, reward in enumerate((0.2, 0.6, 0.6, math.nan, 0.4)):
        monitor.record_evaluation(step, reward)
    assert (monitor.state.best_step, monitor.state.best_reward, monitor.state.evaluated) == (1, 0.6, 4)


def test_a_monitor_goes_on_from_its_state_in_a_checkpoint():
    rewards = [0.9, 0.8, 0.1, 0.4, 0.9, 0.2, 0.1, 0.9]

    def checks(monitor, steps):
        return [(monitor.check(step, {"reward": rewards[step]}), monitor.must_roll_back) for step in steps]

    for stop in range(1, len(rewards)):
        straight, first = guarded(reward_window=2), guarded(reward_window=2)
        for monitor in (straight, first):
            monitor.record_evaluation(0, 0.9)
        expected, begun = checks(straight, range(len(rewards))), checks(first, range(stop))
        resumed = guarded(HealthState(**json.loads(json.dumps(asdict(first.state)))), reward_window=2)
        assert begun + checks(resumed, range(stop, len(rewards))) == expected
        assert resumed.state == straight.state
    assert [must for _, must in expected].count(True) == 2
