"""The packaged initial policy for search knows the format and is often wrong."""

from dataclasses import replace

import pytest

from memsearcher_jax.launch import cli
from memsearcher_jax.logs.trajectories import summarize_trajectory
from memsearcher_jax.rl import init_state, setup
from memsearcher_jax.rl.evaluate import evaluate
from memsearcher_jax.rl.metrics import answer_metrics
from memsearcher_jax.rl.reward_fn import answer_rewards
from memsearcher_jax.runtime import load_weights
from memsearcher_jax.types import StopReason

WEIGHTS = "package:tiny"


@pytest.fixture(scope="module")
def config():
    preset = cli.load_preset("tiny_warmstart")
    evaluation = replace(preset.evaluation, temperature=1.0, max_questions=40)
    return replace(preset, model=replace(preset.model, path=WEIGHTS), evaluation=evaluation)


def test_weights_match_the_preset_that_makes_them(config):
    load_weights.check_weights(WEIGHTS, config.model)
    assert setup.open_tokenizer(config.model).vocab_size <= config.model.vocab_size
    assert load_weights.newest_step(WEIGHTS) is None


@pytest.mark.slow
def test_policy_keeps_the_format_and_is_often_wrong(config, tmp_path):
    run = setup.prepare(config, tmp_path, training=False)
    params = setup.publish(run, init_state.initial_params(run))
    scored = evaluate(run, setup.make_driver(run, evaluation=True), params, print, answer_rewards)
    metrics = answer_metrics([summarize_trajectory(one) for one in scored])
    answered = sum(one.trajectory.outcome.stop is StopReason.ANSWERED for one in scored) / len(scored)
    assert answered > 0.85
    assert 0.05 < metrics["exact_match"] < 0.5
