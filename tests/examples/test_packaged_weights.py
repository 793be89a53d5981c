"""The packaged initial policies know their formats and are often wrong; tests/rl/test_learning.py improves them."""

from dataclasses import replace

import pytest

from memsearcher_jax.launch import cli
from memsearcher_jax.logs.trajectories import summarize_trajectory
from memsearcher_jax.rl import setup, state
from memsearcher_jax.rl.evaluate import evaluate
from memsearcher_jax.rl.metrics import trajectory_metrics
from memsearcher_jax.rl.rollout import make_jobs
from memsearcher_jax.runs import load_weights
from memsearcher_jax.types import StopReason

# By preset, the warm start that makes its weights.
WARM_STARTS = {
    "tiny": "tiny_warmstart",
    "tiny_search_r1": "tiny_baselines_warmstart",
    "tiny_compact": "tiny_compact_warmstart",
    "tiny_rag": "tiny_baselines_warmstart",
    "tiny_direct": "tiny_baselines_warmstart",
    "tiny_memagent": "tiny_memagent_warmstart",
    "tiny_memalpha": "tiny_memalpha_warmstart",
}
# Bounds of exact match, sampled. Direct answers are guesses about entities that no policy has seen.
BOUNDS = {"tiny": (0.05, 0.5), "tiny_search_r1": (0.1, 0.5), "tiny_compact": (0.1, 0.5)}
BOUNDS |= {"tiny_rag": (0.05, 0.4), "tiny_direct": (0.0, 0.1)}


@pytest.mark.parametrize(("name", "warm_start"), WARM_STARTS.items())
def test_weights_match_the_preset_that_makes_them(name, warm_start):
    preset, warm_start = cli.load_preset(name), cli.load_preset(warm_start)
    assert preset.model == replace(warm_start.model, path=preset.model.path)
    if name in ("tiny", "tiny_memalpha"):
        assert (preset.agent, preset.memalpha) == (warm_start.agent, warm_start.memalpha)
    load_weights.check_weights(preset.model.path, preset.model)
    assert setup.open_tokenizer(preset.model).vocab_size <= preset.model.vocab_size
    assert load_weights.newest_step(preset.model.path) is None


def evaluated(preset, workspace):
    """Metrics of sampled test trajectories with the initial weights."""
    preset = replace(preset, evaluation=replace(preset.evaluation, temperature=1.0, max_questions=40))
    run = setup.prepare(preset, workspace, training=False)
    params = setup.publish(run, state.initial_params(run))
    reward_fn = state.open_reward_fn(run, evaluation=True)
    jobs = make_jobs(run.problems.test, 1)
    scored = evaluate(run, setup.make_driver(run, evaluation=True), params, print, reward_fn, jobs)
    return trajectory_metrics([summarize_trajectory(one) for one in scored], run.agent)


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDS)
def test_policy_keeps_the_format_and_is_often_wrong(name, tmp_path):
    preset = cli.load_preset(name)
    metrics = evaluated(replace(preset, data=cli.load_preset("tiny_warmstart").data), tmp_path)
    low, high = BOUNDS[name]
    assert metrics[f"stop/{StopReason.ANSWERED.value}"] > 0.85
    assert low <= metrics["exact_match"] <= high


@pytest.mark.slow
def test_policy_answers_from_the_memory_and_stores_a_part(tmp_path):
    preset = cli.load_preset("tiny_memalpha")
    streams = replace(preset.data.streams, train_streams=1, test_streams=8, test_chunks=(10,))
    metrics = evaluated(replace(preset, data=replace(preset.data, streams=streams)), tmp_path)
    assert metrics[f"stop/{StopReason.STREAM_READ.value}"] == 1
    assert 0.1 < metrics["accuracy"] < 0.6
    assert metrics["calls_ok_share"] > 0.7
