"""A nano engine, conversations that it generates, and the plain forward pass as the reference."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.sampling.engine import Engine
from tests.support import NANO

SETTINGS = SamplingConfig(
    slots=4,
    context_tokens=128,
    decode_steps_per_call=5,
    page_tokens=16,
    prefill_chunk=8,
    prefill_buckets=(16, 48),
    temperature=1.0,
    top_k=0,
    top_p=1.0,
)
STOP = 7


def key():
    """A function, because a key made at import would start JAX before tests/conftest.py sets its flags."""
    return jax.random.key(11)


@pytest.fixture(scope="session")
def params():
    """Random weights with every bias and norm away from its initial value, which would hide errors."""

    @jax.jit
    def make(key):
        leaves, tree = jax.tree.flatten(qwen.init(key, NANO))
        keys = jax.random.split(key, len(leaves))
        perturbed = [leaf + 0.2 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(tree, perturbed)

    return make(jax.random.key(0))


def one_device_mesh():
    return sharding.make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])


def make_engine(settings=SETTINGS, mesh=None, stop_ids=(STOP,), model=NANO):
    return Engine(model, settings, stop_ids, mesh or one_device_mesh())


@pytest.fixture(scope="session")
def engine():
    """One engine for the tests that need no special settings; each test calls `start`."""
    return make_engine()


def prompt(seed: int) -> list[int]:
    """A random text of up to 46 tokens."""
    rng = np.random.default_rng(seed)
    lengths = [int(rng.integers(0 if index == 3 else 1, width + 1)) for index, width in enumerate((12, 8, 4, 16, 6))]
    return [id for length in lengths for id in rng.integers(10, 250, length).tolist()]


def generate(engine, slot):
    """Steps until the slot's generation ends."""
    while True:
        for generation in engine.step():
            if generation.slot == slot:
                return generation


@jax.jit
def full_forward(params, ids_1C, segment_1C):
    """Log-probabilities [C, V] of each next token, from one pass without a cache."""
    position_1C = jnp.arange(ids_1C.shape[1])[None]
    logits_1CV, _ = qwen.forward(params, NANO, ids_1C, position_1C, segment_1C)
    return jax.nn.log_softmax(logits_1CV[0])


def next_token_logprobs(params, ids):
    """Log-probabilities [T - 1, V] of each token but the first. Padded to one shape, to compile once."""
    ids_1C = np.zeros((1, SETTINGS.context_tokens), np.int32)
    ids_1C[0, : len(ids)] = ids
    segment_1C = (np.arange(SETTINGS.context_tokens) < len(ids)).astype(np.int32)[None]
    return np.asarray(full_forward(params, ids_1C, segment_1C))[: len(ids) - 1]


def assert_recorded_logprobs(params, recorded, atol=3e-5):
    """The log-probability of every sampled token is that of the full forward pass; elsewhere it is 0."""
    ids_T, sampled_T = np.array(recorded.ids), np.array(recorded.sampled)
    expected_T = np.concatenate([[0], next_token_logprobs(params, ids_T)[np.arange(len(ids_T) - 1), ids_T[1:]]])
    # CPUs sum products in different orders: the largest difference on one with AMX is 1.2e-5.
    np.testing.assert_allclose(recorded.logprobs, np.where(sampled_T, expected_T, 0), atol=atol)


def run_conversations(engine, params, numbers, rule=None):
    """As many concurrent conversations as there are slots, each starting when a slot is free."""
    engine.start(params, key())
    waiting, running, done = list(numbers), {}, {}
    while waiting or running:
        for slot in engine.scheduler.free_slots:
            if waiting:
                number = waiting.pop(0)
                running[slot] = (number, 0)
                engine.scheduler.open_context(slot, prompt(number), (number, 0), 9, rule)
        for generation in engine.step():
            number, turn = running[generation.slot]
            if turn == 0:
                rng = np.random.default_rng(100 + number)
                ids = rng.integers(10, 250, int(rng.integers(1, 45))).tolist()
                engine.scheduler.extend_context(generation.slot, ids, max_tokens=9)
                running[generation.slot] = (number, 1)
            else:
                done[number] = engine.scheduler.pop_context(generation.slot)
                del running[generation.slot]
    return done


@pytest.fixture(scope="session")
def nano() -> SimpleNamespace:
    """The helpers of this file."""
    return SimpleNamespace(
        SETTINGS=SETTINGS,
        STOP=STOP,
        key=key,
        make_engine=make_engine,
        prompt=prompt,
        generate=generate,
        run_conversations=run_conversations,
        next_token_logprobs=next_token_logprobs,
        assert_recorded_logprobs=assert_recorded_logprobs,
    )
