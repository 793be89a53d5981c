"""The plan counts the memory that a run really holds."""

import gc
import io
import math
from dataclasses import replace

import jax
import pytest

from memsearcher_jax.launch import cli
from memsearcher_jax.logs.progress import Progress
from memsearcher_jax.planning.tpu_plan import resident_memory
from memsearcher_jax.rl import collector, setup, state
from memsearcher_jax.rl.rollout import RolloutDriver
from memsearcher_jax.rl.training_run import open_collector, train_run
from memsearcher_jax.training.trainer import Trainer


def held_bytes():
    """Of the first device. Reading the data of shards would add arrays."""
    gc.collect()
    arrays = (x for x in jax.live_arrays() if jax.devices()[0] in x.sharding.device_set)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)


@pytest.mark.slow
def test_a_run_holds_what_the_plan_counts_in_each_phase(tmp_path, monkeypatch):
    """The update and publishing have the memory of the sampler, also in the second step."""
    config = cli.load_preset("nano")
    config = replace(
        config,
        agent=replace(config.agent, max_turns=2, completion_tokens=16),
        training=replace(config.training, kl_coefficient=0.001),
        rl=replace(config.rl, steps=2, prompts_per_step=4, group_size=2, evaluate_every=0, checkpoint_every=2),
    )
    before, held = held_bytes(), {"rewards": [], "update": [], "publish": [], "rollout": []}
    run = setup.prepare(config, tmp_path)
    start = state.open_state(run)

    def measured(phase, function, *, after=False):
        def call(*args, **options):
            if not after:
                held[phase].append(held_bytes() - before)
            result = function(*args, **options)
            if after:
                held[phase].append(held_bytes() - before)
            return result

        return call

    monkeypatch.setattr(state, "publish", measured("publish", state.publish))
    monkeypatch.setattr(RolloutDriver, "trajectories", measured("rollout", RolloutDriver.trajectories, after=True))
    monkeypatch.setattr(collector, "make_rollout_batch", measured("rewards", collector.make_rollout_batch))
    monkeypatch.setattr(Trainer, "step", measured("update", Trainer.step))
    train_run(*start, open_collector(*start), tmp_path / "out", None, Progress("train", 2, stream=io.StringIO()))
    planned = resident_memory(config, run.meshes)
    assert planned.reference and planned.sampler_params and planned.slots
    expected = {
        "rewards": planned.training + planned.sampler_params,
        "publish": planned.training,
        "rollout": planned.rollout,
    }
    for phase, size in expected.items():
        assert len(held[phase]) >= 2 and all(abs(x - size) < 0.02 * size for x in held[phase]), (phase, held, planned)
    # The packed rows of a step are not planned. In this run they take less than the sampler's weights.
    assert max(held["update"]) < planned.training + planned.sampler_params, (held, planned)
