"""training.memory_weight: the loss of the tokens of memories, scaled."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest

from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.training import update
from memsearcher_jax.training.config import TrainingConfig
from memsearcher_jax.training.packing import TrainingExample, merge_equal, plan_rows
from memsearcher_jax.training.trainer import make_trainer
from tests.support import NANO
from tests.training.conftest import host_params

TRAINING = TrainingConfig(
    seq_len=32,
    minibatch_rows=8,
    logit_chunk=16,
    learning_rate=1e-3,
    kl_coefficient=0.0,
    aggregate="seq-mean-token-sum-norm",
    norm_tokens=64,
)


def examples():
    """Contexts with a shared beginning, in which some of the trained tokens are those of memories."""
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(10):
        ids = np.append([1, 2, 3, 4], rng.integers(0, NANO.vocab_size, 10))
        sampled = np.append(np.zeros(5, bool), rng.random(9) < 0.7)
        memory = sampled & (rng.random(14) < 0.5)
        logprobs = np.where(sampled, -3.0, 0.0)
        drawn.append(TrainingExample(ids, logprobs, sampled, float(rng.normal()), memory=memory))
    return drawn


@functools.cache
def compiled_trainer(memory_weight):
    settings = replace(TRAINING, memory_weight=memory_weight)
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=1, tensor=1), jax.devices()[:1])
    with jax.set_mesh(mesh):
        return settings, mesh, make_trainer(NANO, settings, mesh, initial_params(), method="grpo", temperature=1.0)


def initial_params():
    return jax.tree.map(jax.numpy.array, host_params(NANO))


def step(drawn, memory_weight=1.0):
    """(metrics, weights) of one step with one mini-batch."""
    settings, mesh, trainer = compiled_trainer(memory_weight)
    with jax.set_mesh(mesh):
        state = update.init_state(initial_params(), NANO, update.make_optimizer(settings), mesh)
        state, metrics = trainer.step(state, drawn, np.random.default_rng(1), lambda message: None, 0)
    assert metrics["updates"] == 1
    return metrics, jax.device_get(state.params)


def only(drawn, kind):
    """The examples with the mask of `training.train_on`."""
    chosen = []
    for example in drawn:
        sampled = example.sampled & (example.memory if kind == "memories" else ~example.memory)
        if sampled.any():
            chosen.append(replace(example, sampled=sampled))
    return chosen


@pytest.mark.slow
def test_the_loss_is_that_of_actions_plus_the_weighted_one_of_memories():
    drawn = examples()
    parts = {kind: step(only(drawn, kind))[0]["policy_loss"] for kind in ("actions", "memories")}
    for weight in (1.0, 0.25):
        metrics, _ = step(drawn, memory_weight=weight)
        assert metrics["policy_loss"] == pytest.approx(
            parts["actions"] + weight * parts["memories"], rel=1e-4, abs=1e-6
        )
        assert metrics["trained_tokens"] == sum(example.sampled.sum() for example in drawn)
    assert abs(parts["memories"]) > 1e-3


@pytest.mark.variant
def test_without_a_weight_marks_change_nothing():
    drawn = examples()
    unmarked = [replace(example, memory=None) for example in drawn]
    (metrics, weights), (others, other_weights) = step(drawn), step(unmarked)
    assert metrics == others
    jax.tree.map(np.testing.assert_array_equal, weights, other_weights)
    with pytest.raises(ValueError, match=r"training\.memory_weight needs contexts whose memories are marked"):
        step(unmarked, memory_weight=0.5)


def test_the_mask_of_rows_is_that_of_their_examples():
    """Also where rows hold the beginning of their examples once."""
    drawn = examples()
    rows = plan_rows(drawn, TRAINING.seq_len, TRAINING.minibatch_rows, np.random.default_rng(0))
    batch, memory_BT = rows.batch(), rows.memory_mask()
    assert memory_BT.sum() == sum(example.memory.sum() for example in drawn)
    assert not (memory_BT & ~batch.mask_BT).any()
    ids = sorted(batch.ids_BT[memory_BT].tolist())
    assert ids == sorted(id for example in drawn for id in example.ids[example.memory].tolist())


def test_examples_with_other_marks_are_not_equal():
    example = examples()[0]
    other = replace(example, memory=~example.memory & example.sampled)
    assert len(merge_equal([example, example, other])) == 2
    with pytest.raises(ValueError, match="memory must have as many entries as ids"):
        replace(example, memory=example.memory[:-1])
