"""The packaged initial policy for streams copies and answers but stores too little; a short run makes it store more."""

import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from memsearcher_jax.launch import cli
from memsearcher_jax.logs.metrics import read_metrics
from memsearcher_jax.logs.trajectories import summarize_trajectory
from memsearcher_jax.rl import init_state, setup
from memsearcher_jax.rl.evaluate import evaluate
from memsearcher_jax.rl.metrics import stream_metrics
from memsearcher_jax.runtime import load_weights
from memsearcher_jax.types import StopReason

WEIGHTS = "package:tiny_memalpha"
TRAIN = Path(cli.__file__).with_name("tpu_train.py")


@pytest.fixture(scope="module")
def config():
    preset = cli.load_preset("tiny_memalpha")
    streams = replace(preset.data.streams, train_streams=1, test_streams=8, test_chunks=(10,))
    return replace(
        preset,
        data=replace(preset.data, streams=streams),
        evaluation=replace(preset.evaluation, temperature=1.0),
    )


def test_weights_match_the_preset_that_makes_them(config):
    warmstart = cli.load_preset("tiny_memalpha_warmstart")
    assert config.model == replace(warmstart.model, path=WEIGHTS)
    assert (config.agent, config.memalpha) == (warmstart.agent, warmstart.memalpha)
    load_weights.check_weights(WEIGHTS, config.model)
    assert setup.open_tokenizer(config.model).vocab_size <= config.model.vocab_size
    assert load_weights.newest_step(WEIGHTS) is None


@pytest.mark.slow
def test_policy_answers_from_the_memory_and_stores_a_part(config, tmp_path):
    run = setup.prepare(config, tmp_path, training=False)
    params = setup.publish(run, init_state.initial_params(run))
    reward_fn = init_state.open_reward_fn(run, evaluation=True)
    scored = evaluate(run, setup.make_driver(run, evaluation=True), params, print, reward_fn)
    assert all(one.trajectory.outcome.stop is StopReason.STREAM_READ for one in scored)
    metrics = stream_metrics([summarize_trajectory(one) for one in scored])
    assert 0.1 < metrics["accuracy"] < 0.6
    assert metrics["calls_ok_share"] > 0.7


@pytest.mark.slow
def test_accuracy_improves_within_a_few_steps(tmp_path):
    """Runs in a new process, which has one device."""
    settings = "--config tiny_memalpha --rl.steps 12 --sampling.decode_batch_sizes --training.grad_accum_steps 4"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    run = [sys.executable, str(TRAIN), *settings.split(), "--out", str(tmp_path / "run")]
    subprocess.run(run, check=True, env=environment, capture_output=True, timeout=900)
    accuracy = [step["accuracy"] for step in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert statistics.fmean(accuracy[-3:]) - statistics.fmean(accuracy[:3]) > 0.1, accuracy
