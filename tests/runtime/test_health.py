"""Alarms are reported after `patience` steps, and consecutive skipped updates abort a run."""

import math

import pytest

from memsearcher_jax.runtime.health import HealthConfig, HealthMonitor, RunAborted


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


def test_action_stop_aborts_the_run_on_an_alarm():
    config = HealthConfig(max_kl=0.1, patience=3, action="stop")
    with pytest.raises(RunAborted, match=r"step 2: kl is 0\.5 and health.max_kl 0\.1; health.action is stop"):
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
