"""Speculative decoding changes the number of steps, and nothing else."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsearcher_jax.model import qwen
from memsearcher_jax.model.kv_cache import Cache
from memsearcher_jax.sampling.decode import Decode, decode
from memsearcher_jax.sampling.speculation import NGRAM, propose
from tests.support import NANO

CAPACITY = 24


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=CAPACITY), st.integers(1, 5))
def test_the_draft_is_what_followed_the_previous_occurrence(ids, speculative_tokens):
    row_1C = np.full((1, CAPACITY), 9, np.int32)
    row_1C[0, : len(ids)] = ids
    draft_1W, drafted_1 = propose(jnp.asarray(row_1C), jnp.array([len(ids)]), speculative_tokens)
    ends = [end for end in range(NGRAM, len(ids)) if ids[end - NGRAM : end] == ids[-NGRAM:]]
    expected = ids[ends[-1] : ends[-1] + speculative_tokens] if ends else []
    assert draft_1W[0, : drafted_1[0]].tolist() == expected


@pytest.fixture(scope="module")
def speculative(nano):
    return nano.make_engine(replace(nano.SETTINGS, speculative_tokens=3, decode_steps_per_call=8))


@pytest.fixture(scope="module")
def copying(params):
    """Weights that nearly always give the token after the last one: a policy that is easy to draft."""
    leaves = jax.tree.map(lambda x: x * 0.0, params["layers"])
    draw = np.random.default_rng(0).standard_normal(params["embed"].shape).astype(np.float32)
    return params | {"layers": leaves, "embed": jnp.asarray(draw) * 0.55}


def test_the_tokens_are_those_without_speculation(params, engine, speculative, nano):
    numbers = range(6)
    plain, speculated = (
        nano.run_conversations(engine, params, numbers),
        nano.run_conversations(speculative, params, numbers),
    )
    for number in numbers:
        assert speculated[number].ids == plain[number].ids
        np.testing.assert_allclose(speculated[number].logprobs, plain[number].logprobs, atol=1e-5)
    assert speculative.stop().generated_tokens == engine.stop().generated_tokens


def repeated() -> list[int]:
    """A text with a repetition, so that its continuation can be looked up."""
    return [11, 12, 13, 14, 11, 12, 13, 14, 11, 12, 13]


def test_predictable_text_takes_fewer_steps(engine, speculative, copying, nano):
    steps = {}
    for name, target in (("plain", engine), ("speculative", speculative)):
        target.start(copying, nano.key())
        target.scheduler.open_context(0, repeated(), (0, 0), max_tokens=24)
        ids = nano.generate(target, 0).ids
        target.scheduler.pop_context(0)
        steps[name] = target.stop().steps * (5 if target is engine else 2), ids
    assert steps["speculative"][1] == steps["plain"][1]
    assert steps["speculative"][0] < steps["plain"][0] * 0.7


def test_logits_behind_the_last_token_of_a_generation_need_not_be_finite(copying, nano, monkeypatch):
    """Both contexts accept a draft, after which the logits are NaN; only the second one may still generate there."""
    logits = qwen.logits
    monkeypatch.setattr(qwen, "logits", lambda *args: logits(*args).at[:, 1:].set(jnp.nan))
    call = Decode(
        token_A=np.array([11, 11]),
        length_A=np.array([6, 6]),
        remaining_A=np.array([1, 2]),
        rng_stream_A2=np.zeros((2, 2), np.uint32),
        temperature_A=np.zeros(2, np.float32),
        top_k_A=np.zeros(2, np.int32),
        top_p_A=np.ones(2, np.float32),
        page_table_AN=np.array([[0], [1]]),
        ids_AC=np.where(np.arange(CAPACITY) < 6, 11, 0) * np.ones((2, 1), int),
    )
    program = jax.jit(partial(decode, NANO, 4, 1, (nano.STOP,)))  # calls of 4 tokens, drafts of 1
    _, output = program(Cache.empty(NANO, 2, CAPACITY), copying, nano.key(), call)
    assert output.token_AJ[:, 0].tolist() == [11, 11]
    assert output.count_A.tolist() == [1, 1]
    assert output.remaining_A.tolist() == [0, 0]
    assert output.finite_A.tolist() == [True, False]


def test_the_distribution_is_that_of_plain_sampling(speculative, params, nano):
    """Token counts over many contexts agree with the full forward pass within five standard deviations.

    Each context drafts its tokens, rightly in some contexts and wrongly in others.
    """
    prompt, streams = repeated(), 600
    speculative.start(params, jax.random.key(3))
    drawn, waiting = [], list(range(streams))
    while waiting or speculative.scheduler.active:
        for slot in speculative.scheduler.free_slots:
            if waiting:
                speculative.scheduler.open_context(slot, prompt, (waiting.pop(), 0), max_tokens=2)
        for generation in speculative.step():
            drawn.append(speculative.scheduler.pop_context(generation.slot).ids)
    first = np.array([ids[len(prompt)] for ids in drawn])
    probability_V = np.exp(nano.next_token_logprobs(params, np.array(drawn[0][: len(prompt) + 1]))[-1])
    count_V = np.bincount(first, minlength=len(probability_V))
    deviation_V = np.sqrt(streams * probability_V * (1 - probability_V))
    assert np.all(np.abs(count_V - streams * probability_V) < 5 * deviation_V + 1)
