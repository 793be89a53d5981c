"""The engine against the plain forward pass: what it samples, what it records, what it never computes twice."""

from dataclasses import replace

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
    prefill_rows=2,
    prefill_buckets=(8, 32),
    temperature=1.0,
    top_k=0,
    top_p=1.0,
)
STOP = 7
KEY = jax.random.key(11)


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
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


def test_recorded_logprobs_are_those_of_the_full_forward(params, engine):
    engine.start(params, KEY)
    for number in range(4):
        assert_recorded_truly(params, converse(engine, number))


def test_greedy_tokens_are_the_argmax_of_the_full_forward(params):
    """Decode equals forward, and the padded buffers equal the contiguous prompt, token by token."""
    engine = make_engine(replace(SETTINGS, temperature=0.0))
    engine.start(params, KEY)
    for number in range(4):
        recorded = converse(engine, number)
        ids = np.array(recorded.ids)
        assert flat(prompt(number)) == ids[: len(prompt(number))].tolist()
        sampled = np.flatnonzero(recorded.sampled)
        np.testing.assert_array_equal(ids[sampled], predictions(params, ids).argmax(-1)[sampled - 1])


def test_a_generation_ends_at_a_stop_token_or_at_its_limit(params):
    engine = make_engine(stop_ids=tuple(range(0, 264, 3)))
    engine.start(params, KEY)
    ends = set()
    for number in range(16):
        engine.begin(0, prompt(number), (number, 0), max_tokens=4)
        ids = speak(engine, 0).ids
        engine.take(0)
        assert all(id % 3 for id in ids[:-1])
        assert ids[-1] % 3 == 0 or len(ids) == 4
        ends.add(ids[-1] % 3 == 0)
    assert ends == {True, False}


def test_a_context_may_fill_its_slot_to_the_last_token(params, engine):
    engine.start(params, KEY)
    engine.begin(0, prompt(0), (0, 0), max_tokens=1)
    speak(engine, 0)
    left = SETTINGS.context_tokens - len(prompt(0)) - 1
    assert not engine.fits(0, left)
    assert engine.fits(0, left - 3)
    engine.extend(0, [50] * (left - 3), max_tokens=100)
    assert len(speak(engine, 0).ids) <= 3
    assert_recorded_truly(params, engine.take(0))


def run_all(engine, params, numbers):
    """As many conversations side by side as there are slots, each starting when a slot is free."""
    engine.start(params, KEY)
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


def test_slots_order_and_company_do_not_matter(params, engine):
    numbers = list(range(7))
    alone = make_engine(replace(SETTINGS, slots=1, prefill_rows=1))
    other = make_engine(replace(SETTINGS, slots=3, decode_tokens=2, prefill_buckets=(16,)))
    ours = run_all(alone, params, numbers)
    for theirs in (run_all(engine, params, numbers), run_all(other, params, numbers[::-1])):
        for number in numbers:
            assert theirs[number].ids == ours[number].ids
            assert theirs[number].sampled == ours[number].sampled
            np.testing.assert_allclose(theirs[number].logprobs, ours[number].logprobs, atol=1e-5)


def test_another_stream_or_key_draws_other_tokens(params, engine):
    drawn = set()
    for key, stream in ((KEY, (0, 0)), (KEY, (1, 0)), (KEY, (0, 1)), (jax.random.key(12), (0, 0))):
        engine.start(params, key)
        engine.begin(0, prompt(0), stream, max_tokens=9)
        drawn.add(speak(engine, 0).ids)
        engine.take(0)
    assert len(drawn) == 4


def test_eight_devices_sample_what_one_does(params):
    settings = replace(SETTINGS, slots=8)
    numbers = list(range(9))
    one = run_all(make_engine(settings), params, numbers)
    mesh = sharding.make_mesh(MeshConfig(data=4, fsdp=1, tensor=2))
    placed = jax.device_put(params, sharding.param_shardings(NANO, mesh))
    eight = run_all(make_engine(settings, mesh), placed, numbers)
    for number in numbers:
        assert eight[number].ids == one[number].ids
        np.testing.assert_allclose(eight[number].logprobs, one[number].logprobs, atol=1e-5)


def test_no_token_is_prefilled_twice(params, engine):
    """Prefill sees the standing text and the last token of each generation, and nothing else."""
    done = run_all(engine, params, range(6))
    total = sum(len(recorded.ids) for recorded in done.values())
    counters = engine.counters
    assert counters.standing_tokens + counters.generated_tokens == total
    # A context prefills its prompt but the last token, which decode feeds; then the last token of the first
    # generation and the observation, again but the last: one token less than was given.
    assert counters.prefilled_tokens == counters.standing_tokens - len(done)


def test_nothing_compiles_after_warm_up(params, compilations):
    engine = make_engine()
    engine.warm_up(params)
    engine.start(params, KEY)
    with compilations() as count:
        run_all(engine, params, range(5))
    assert count == []


def test_weights_can_not_change_under_a_context(params, engine):
    engine.start(params, KEY)
    engine.begin(0, prompt(0), (0, 0), max_tokens=3)
    with pytest.raises(RuntimeError, match="1 slots still hold contexts"):
        engine.start(params, KEY)
    with pytest.raises(RuntimeError, match="slot 0 is still speaking"):
        engine.take(0)
    speak(engine, 0)
    engine.take(0)
