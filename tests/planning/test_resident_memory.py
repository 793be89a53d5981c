"""The plan counts the memory that a run really holds."""

import gc
from dataclasses import replace

import jax

from memsearcher_jax.launch import cli
from memsearcher_jax.planning.tpu_plan import resident_memory
from memsearcher_jax.rl import init_state, setup
from memsearcher_jax.rl.evaluate import Shard, evaluate
from memsearcher_jax.rl.rng import named_key
from memsearcher_jax.rl.rollout import make_jobs


def held_bytes():
    """Of the first device."""
    gc.collect()
    device = jax.devices()[0]
    shards = (shard for x in jax.live_arrays() for shard in x.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def test_a_run_holds_what_the_plan_counts_also_after_an_evaluation(tmp_path):
    config = cli.load_preset("nano")
    config = replace(
        config,
        training=replace(config.training, kl_coefficient=0.001),
        data=replace(config.data, encyclopedia=replace(config.data.encyclopedia, test_questions=8)),
    )
    before = held_bytes()
    run = setup.prepare(config, tmp_path)
    start = init_state.initial_state(run)
    params = setup.publish(run, start.trainer.weights(start.state))
    driver = setup.make_driver(run)
    evaluation = setup.make_driver(run, evaluation=True, engine=driver.executor.engine)
    driver.rollout(make_jobs(run.problems.train[:2], 2), params, named_key(0, "rollout", 0), lambda line: None)
    evaluate(run, evaluation, params, lambda line: None, start.reward_fn, Shard(0, 1))
    planned, held = resident_memory(config, run.meshes), held_bytes() - before
    assert planned.reference and planned.sampler_params and planned.slots
    assert abs(held - planned.total) < 0.02 * planned.total, (held, planned)
