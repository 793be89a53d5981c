"""The packaged initial policy of the baselines knows their protocols and is often wrong."""

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

# Bounds of exact match, sampled. Direct answers are guesses about entities that no policy has seen.
PRESETS = {"tiny_search_r1": (0.1, 0.5), "tiny_rag": (0.05, 0.4), "tiny_direct": (0.0, 0.1)}


@pytest.mark.parametrize("name", PRESETS)
def test_weights_match_the_preset_that_makes_them(name):
    model, warmstart = cli.load_preset(name).model, cli.load_preset("tiny_baselines_warmstart").model
    assert model == replace(warmstart, path="package:tiny_baselines")
    load_weights.check_weights(model.path, model)
    assert setup.open_tokenizer(model).vocab_size <= model.vocab_size
    assert load_weights.newest_step(model.path) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_policy_keeps_the_format_and_is_often_wrong(name, tmp_path):
    preset = cli.load_preset(name)
    config = replace(preset, evaluation=replace(preset.evaluation, temperature=1.0, max_questions=40))
    run = setup.prepare(config, tmp_path, training=False)
    params = setup.publish(run, init_state.initial_params(run))
    scored = evaluate(run, setup.make_driver(run, evaluation=True), params, print, answer_rewards)
    metrics = answer_metrics([summarize_trajectory(one) for one in scored])
    low, high = PRESETS[name]
    assert metrics[f"stop/{StopReason.ANSWERED.value}"] > 0.85
    assert low <= metrics["exact_match"] <= high
