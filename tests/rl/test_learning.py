"""It learns: a short run from the packaged warm start earns clearly more at its end than at its beginning."""

import statistics

import pytest
import tpu_train

from memsearcher_jax.report.metrics import read_metrics

STEPS = 12


@pytest.mark.slow
def test_reward_rises_from_the_packaged_start(tmp_path):
    """Questions of one hop: within reach of the start, so that a minute shows it.

    A mean of four steps over 128 trajectories each, of rewards between 0 and 1 that deviate by less than 0.5, is known
    to 0.022; the groups of eight that share a question double that at most. 0.15 is more than two such deviations of a
    difference of two means, and less than half of what the run gains.
    """
    run = ["--config", "tiny", "--out", str(tmp_path / "run"), "--rl.steps", str(STEPS), "--data.world.hops", "1"]
    tpu_train.main([*run, "--data.world.train_questions", "500", "--training.accumulate", "1"])
    rewards = [step["reward"] for step in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert statistics.fmean(rewards[-4:]) - statistics.fmean(rewards[:4]) > 0.15
