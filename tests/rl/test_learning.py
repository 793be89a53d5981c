"""It learns: a short run from the packaged warm start earns clearly more at its end than at its beginning."""

import os
import statistics
import subprocess
import sys
from pathlib import Path

import cli
import pytest

from memsearcher_jax.report.metrics import read_metrics

TRAIN = Path(cli.__file__).with_name("tpu_train.py")


@pytest.mark.slow
def test_reward_rises_from_the_packaged_start(tmp_path):
    """Questions of two hops, which the start mostly guesses at. In a process of its own: on one device, as on a laptop.

    A step has sixteen questions whose mean rewards deviate by about 0.3, so that the difference of two means over two
    and three steps is known to 0.07. The bound is twice that, and half of what the run gains.
    """
    settings = "--config tiny --data.world.hops 2 --data.world.train_questions 1000 --rl.steps 6 --rl.rollouts 6"
    # Half of the time went into compiling: these compile less, and change no number but by rounding.
    settings += " --sampling.decode_rows --sampling.prefill_buckets 256 --training.accumulate 4"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    run = [sys.executable, str(TRAIN), *settings.split(), "--out", str(tmp_path / "run")]
    subprocess.run(run, check=True, env=environment, capture_output=True, timeout=900)
    rewards = [step["reward"] for step in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert statistics.fmean(rewards[-3:]) - statistics.fmean(rewards[:2]) > 0.15, rewards
