"""Alarms are heard once they last, and updates that come to nothing end a run."""

import math

import pytest

from memsearcher_jax.rl.alarms import Alarms, RunEnded
from memsearcher_jax.rl.config import AlarmConfig


def after(config, steps):
    """What is told, and the counts of the steps."""
    told = []
    alarms = Alarms(config, told.append)
    return told, [alarms.look(step, numbers)["alarms"] for step, numbers in enumerate(steps)]


@pytest.mark.parametrize(
    ("limit", "metric", "good", "bad"),
    [
        ({"reward_below": 0.2}, "reward", 0.2, 0.1),
        ({"entropy_below": 0.5}, "entropy", 0.6, 0.4),
        ({"entropy_above": 3.0}, "entropy", 2.0, 4.0),
        ({"tokens_below": 50.0}, "tokens_per_turn", 60.0, 40.0),
        ({"tokens_above": 500.0}, "tokens_per_turn", 400.0, 501.0),
        ({"kl_above": 0.1}, "kl", 0.01, 0.2),
        ({"kl_above": 0.1}, "kl", 0.01, math.nan),
    ],
)
def test_a_limit_is_told_once_when_it_has_lasted(limit, metric, good, bad):
    config = AlarmConfig(steps=2, **limit)
    values = [bad, good, bad, bad, bad, good, bad, bad]
    told, counts = after(config, [{metric: value} for value in values])
    assert [line.split(":")[0] for line in told] == ["alarm at step 3", "alarm at step 7"]
    (name,) = limit
    assert f"{metric} is {bad:.4g} and alarms.{name}" in told[0]
    assert counts == [float(value is bad) for value in values]
    assert after(config, [{"loss": 1.0}] * 5) == ([], [0.0] * 5)


def test_without_limits_nothing_is_an_alarm():
    assert after(AlarmConfig(), [{"reward": math.nan, "kl": 1e9, "entropy": 0.0}] * 9)[0] == []


def test_an_alarm_may_end_the_run():
    config = AlarmConfig(kl_above=0.1, steps=3, action="stop")
    with pytest.raises(RunEnded, match=r"step 2: kl is 0\.5 and alarms.kl_above 0\.1; alarms.action is stop"):
        after(config, [{"kl": 0.5}] * 3)


def skipped(of, last, updates=4):
    return {"skipped": float(of), "skipped_last": float(last), "updates": float(updates)}


def test_skipped_updates_in_a_row_end_the_run_across_steps():
    config = AlarmConfig(skipped_updates=6)
    told, _ = after(config, [skipped(3, 2), skipped(3, 0), skipped(0, 0), skipped(3, 3)])
    assert told[0] == "step 0: 3 of 4 updates had a gradient that is not finite: skipped"
    assert len(told) == 3
    with pytest.raises(RunEnded, match="step 1: 7 updates in a row had a gradient that is not finite"):
        after(config, [skipped(3, 3), skipped(4, 4)])
    after(config, [skipped(3, 3), skipped(3, 3)])  # one between them was taken
