"""A model small enough to compile in seconds, and packed rows to train it on."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.training.config import TrainingConfig
from memsearcher_jax.training.packing import PackedBatch, TrainingExample, pack
from memsearcher_jax.training.update import make_optimizer, make_update

MODEL = ModelConfig(
    vocab_size=64,
    embed_size=16,
    ffn_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_size=8,
    max_positions=64,
    compute_dtype="float32",
)
TRAINING = TrainingConfig(seq_len=32, minibatch_rows=16, logit_chunk=16, learning_rate=1e-3, kl_coefficient=0.1)


@functools.cache
def host_params(model: ModelConfig) -> dict:
    return jax.device_get(jax.jit(qwen.init, static_argnums=1)(jax.random.key(0), model))


@functools.cache
def compiled_update(model: ModelConfig, training: TrainingConfig, optimizer, mesh: jax.sharding.Mesh):
    return make_update(model, training, optimizer, mesh, temperature=1.0)


@dataclass(frozen=True)
class Nano:
    """What most tests of this package start from."""

    model: ModelConfig
    training: TrainingConfig
    examples: list[TrainingExample]
    batch: PackedBatch  # exactly one update's rows, with reference log-probabilities
    adam: optax.GradientTransformation  # one object, so that tests share the updates that are compiled with it

    def params(self) -> dict:
        """A new copy each time, because the first update donates it."""
        return jax.tree.map(jnp.array, host_params(self.model))

    def mesh(self, data: int = 1, fsdp: int = 1, tensor: int = 1) -> jax.sharding.Mesh:
        return sharding.make_mesh(MeshConfig(data, fsdp, tensor), jax.devices()[: data * fsdp * tensor])

    def update(self, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh, **changes):
        """An update, compiled once for all tests with the same arguments."""
        return compiled_update(self.model, replace(self.training, **changes), optimizer, mesh)

    def with_reference(self, rows: PackedBatch) -> PackedBatch:
        """Reference log-probabilities that depend on the token and its place in its context alone."""
        return replace(rows, ref_logprob_BT=(-1 - (rows.ids_BT * 7 + rows.position_BT) % 5).astype(np.float32))


def draw_examples(
    prompts: Sequence[Sequence[int]], counts: Sequence[int], longest: int, rng: np.random.Generator
) -> list[TrainingExample]:
    """`counts[i]` contexts that continue prompts[i], with trained tokens anywhere behind the first own token."""
    examples = []
    for prompt, count in zip(prompts, counts, strict=True):
        for _ in range(count):
            own = int(rng.integers(3, longest + 1))
            sampled = np.append(np.zeros(len(prompt) + 1, bool), rng.random(own - 1) < 0.6)
            sampled[-1] = True
            ids = np.append(prompt, rng.integers(0, MODEL.vocab_size, own)).astype(int)
            logprobs = np.log(MODEL.vocab_size) * -(0.8 + 0.4 * rng.random(len(ids)))
            examples.append(TrainingExample(ids, logprobs, sampled, float(rng.normal())))
    return examples


@pytest.fixture(scope="session")
def nano() -> Nano:
    return make_nano()


def make_nano() -> Nano:
    rng = np.random.default_rng(0)
    examples = draw_examples([[]], [12], 24, rng)
    rows = pack(examples, TRAINING.seq_len, TRAINING.minibatch_rows, rng)
    filled = (rows.segment_BT > 0).any(axis=1).sum()
    assert len(rows.ids_BT) == TRAINING.minibatch_rows and filled < len(examples)  # some rows hold several contexts
    plain = Nano(MODEL, TRAINING, examples, rows, make_optimizer(TRAINING))
    return replace(plain, batch=plain.with_reference(rows))
