"""A short run from the packaged SFT weights increases the mean reward."""

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from memsearcher_jax.launch import cli
from memsearcher_jax.logs.metrics import read_metrics

TRAIN = Path(cli.__file__).with_name("tpu_train.py")


@pytest.mark.slow
def test_reward_rises_from_the_packaged_weights(tmp_path):
    """Two-hop questions, which the initial policy mostly guesses. Runs in a separate process with one device.

    A step has sixteen questions whose mean rewards have a standard deviation of about 0.3, so the standard error of the
    difference of two means over two and three steps is 0.07. The bound is twice that, and half of the measured gain.
    """
    settings = "--config tiny --data.encyclopedia.hops 2 --data.encyclopedia.train_questions 1000 --rl.steps 6"
    # Half of the time is compilation; these flags compile fewer programs and change results only by rounding.
    settings += (
        " --rl.group_size 6 --sampling.decode_batch_sizes --sampling.prefill_buckets 256 --training.grad_accum_steps 4"
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(TRAIN), *settings.split(), "--out", str(tmp_path / "run")]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=900)
    rewards = [step["reward"] for step in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert statistics.fmean(rewards[-3:]) - statistics.fmean(rewards[:2]) > 0.15, rewards
