"""A nano engine, conversations to hold with it, and the plain forward pass to compare with."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.sampling.buffer import PromptIds, PromptWidths
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.sampling.engine import Engine
from memsearcher_jax.testing import NANO

WIDTHS = PromptWidths(prefix=12, question=8, bridge=4, memory=16, suffix=6)
SETTINGS = SamplingConfig(
    slots=4,
    context_tokens=128,
    decode_tokens=5,
    rows_per_call=2,
    prefill_piece=8,
    prefill_buckets=(16, 48),
    temperature=1.0,
    top_k=0,
    top_p=1.0,
)
STOP = 7


def key():
    """Not made at import: that would start JAX before tests/conftest.py has set its flags."""
    return jax.random.key(11)


@pytest.fixture(scope="session")
def params():
    """Random weights with every bias and norm away from its start, which would hide an error."""

    @jax.jit
    def make(key):
        leaves, tree = jax.tree.flatten(qwen.init(key, NANO))
        keys = jax.random.split(key, len(leaves))
        moved = [leaf + 0.2 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(tree, moved)

    return make(jax.random.key(0))


def one_device_mesh():
    return sharding.make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])


def make_engine(settings=SETTINGS, mesh=None, stop_ids=(STOP,)):
    return Engine(NANO, settings, WIDTHS, stop_ids, mesh or one_device_mesh())


@pytest.fixture(scope="session")
def engine():
    """One engine for the tests that need nothing special; each starts it anew."""
    return make_engine()


def prompt(seed: int) -> PromptIds:
    """Parts of random lengths, the memory empty now and then."""
    rng = np.random.default_rng(seed)
    lengths = [int(rng.integers(0 if part == 3 else 1, width + 1)) for part, width in enumerate(WIDTHS.parts)]
    return PromptIds(*(tuple(rng.integers(10, 250, length).tolist()) for length in lengths))


def flat(prompt: PromptIds) -> list[int]:
    return [id for part in prompt.parts for id in part]


def speak(engine, slot):
    """Ticks until the slot's generation ends."""
    while True:
        for spoken in engine.tick():
            if spoken.slot == slot:
                return spoken


def converse(engine, number, slot=0):
    """A prompt, an observation of a length of its own, and two generations, in one context."""
    rng = np.random.default_rng(100 + number)
    engine.begin(slot, prompt(number), (number, 0), max_tokens=9)
    speak(engine, slot)
    engine.extend(slot, rng.integers(10, 250, int(rng.integers(1, 45))).tolist(), max_tokens=9)
    speak(engine, slot)
    return engine.take(slot)


@jax.jit
def full_forward(params, ids_1C, segment_1C):
    """Log-probabilities [C, V] of each next token, from one pass without a cache."""
    position_1C = jnp.arange(ids_1C.shape[1])[None]
    logits_1CV, _ = qwen.forward(params, NANO, ids_1C, position_1C, segment_1C)
    return jax.nn.log_softmax(logits_1CV[0])


def predictions(params, ids):
    """What `full_forward` says before each token but the first: [T - 1, V]. Padded to one shape, to compile once."""
    ids_1C = np.zeros((1, SETTINGS.context_tokens), np.int32)
    ids_1C[0, : len(ids)] = ids
    segment_1C = (np.arange(SETTINGS.context_tokens) < len(ids)).astype(np.int32)[None]
    return np.asarray(full_forward(params, ids_1C, segment_1C))[: len(ids) - 1]


def assert_recorded_truly(params, recorded):
    """The log-probability of every sampled token is the full forward's; elsewhere it is 0."""
    ids_T, sampled_T = np.array(recorded.ids), np.array(recorded.sampled)
    expected_T = np.concatenate([[0], predictions(params, ids_T)[np.arange(len(ids_T) - 1), ids_T[1:]]])
    np.testing.assert_allclose(recorded.logprobs, np.where(sampled_T, expected_T, 0), atol=1e-5)


def run_all(engine, params, numbers):
    """As many conversations side by side as there are slots, each starting when a slot is free."""
    engine.start(params, key())
    waiting, running, done = list(numbers), {}, {}
    while waiting or running:
        for slot in engine.free:
            if waiting:
                number = waiting.pop(0)
                running[slot] = (number, 0)
                engine.begin(slot, prompt(number), (number, 0), max_tokens=9)
        for spoken in engine.tick():
            number, turn = running[spoken.slot]
            if turn == 0:
                rng = np.random.default_rng(100 + number)
                ids = rng.integers(10, 250, int(rng.integers(1, 45))).tolist()
                engine.extend(spoken.slot, ids, max_tokens=9)
                running[spoken.slot] = (number, 1)
            else:
                done[number] = engine.take(spoken.slot)
                del running[spoken.slot]
    return done


@pytest.fixture(scope="session")
def nano() -> SimpleNamespace:
    """The names of this file."""
    names = ("WIDTHS", "SETTINGS", "STOP", "key", "make_engine", "prompt", "flat", "speak", "converse", "predictions")
    more = ("assert_recorded_truly", "run_all")
    return SimpleNamespace(**{name: globals()[name] for name in (*names, *more)})
