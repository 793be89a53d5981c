"""Guessing ahead changes how many steps it takes, and nothing else."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsearcher_jax.sampling.buffer import PromptIds
from memsearcher_jax.sampling.speculation import NGRAM, propose, verified

CAPACITY = 24


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=CAPACITY), st.integers(1, 5))
def test_the_guess_is_what_followed_the_same_tokens_the_last_time(ids, draft_tokens):
    row_1C = np.full((1, CAPACITY), 9, np.int32)
    row_1C[0, : len(ids)] = ids
    draft_1D, guessed_1 = propose(jnp.asarray(row_1C), jnp.array([len(ids)]), draft_tokens)
    ends = [end for end in range(NGRAM, len(ids)) if ids[end - NGRAM : end] == ids[-NGRAM:]]
    expected = ids[ends[-1] : ends[-1] + draft_tokens] if ends else []
    assert draft_1D[0, : guessed_1[0]].tolist() == expected


def test_draws_stand_up_to_the_first_that_was_not_guessed():
    draft_SD = jnp.array([[4, 5], [4, 5], [4, 5], [4, 5]])
    token_ST = jnp.array([[4, 5, 6], [4, 9, 6], [9, 5, 6], [4, 5, 6]])
    ends_ST = jnp.array([[False] * 3, [False] * 3, [False] * 3, [True, False, False]])
    assert verified(token_ST, draft_SD, ends_ST).tolist() == [
        [True, True, True],
        [True, True, False],
        [True, False, False],
        [True, False, False],
    ]


@pytest.fixture(scope="module")
def guessing(nano):
    return nano.make_engine(replace(nano.SETTINGS, draft_tokens=3, decode_tokens=8))


@pytest.fixture(scope="module")
def copying(params):
    """Weights that say the token after the last one, nearly always: a policy that is easy to guess."""
    leaves = jax.tree.map(lambda x: x * 0.0, params["layers"])
    draw = np.random.default_rng(0).standard_normal(params["embed"].shape).astype(np.float32)
    return params | {"layers": leaves, "embed": jnp.asarray(draw) * 0.55}


def test_the_tokens_are_those_without_speculation(params, engine, guessing, nano):
    numbers = range(6)
    plain, guessed = nano.run_all(engine, params, numbers), nano.run_all(guessing, params, numbers)
    for number in numbers:
        assert guessed[number].ids == plain[number].ids
        np.testing.assert_allclose(guessed[number].logprobs, plain[number].logprobs, atol=1e-5)
    assert guessing.counters.generated_tokens == engine.counters.generated_tokens


def repeated() -> PromptIds:
    """A text that says the same thing twice, so that its continuation can be looked up."""
    return PromptIds((), (), (), (11, 12, 13, 14, 11, 12, 13, 14), (11, 12, 13))


def test_what_is_easy_to_guess_takes_fewer_steps(engine, guessing, copying, nano):
    steps = {}
    for name, one in (("plain", engine), ("guessing", guessing)):
        one.start(copying, nano.key())
        one.begin(0, repeated(), (0, 0), max_tokens=24)
        ids = nano.speak(one, 0).ids
        one.take(0)
        steps[name] = one.counters.ticks * (5 if one is engine else 2), ids
    assert steps["guessing"][1] == steps["plain"][1]
    assert steps["guessing"][0] < steps["plain"][0] * 0.7


def test_the_distribution_is_that_of_plain_sampling(guessing, params, nano):
    """First and later tokens of many draws, each later one guessed right by some and wrong by others.

    Against the probabilities of the full forward: within five deviations of a count, for every token.
    """
    prompt, streams = repeated(), 600
    guessing.start(params, jax.random.key(3))
    drawn, waiting = [], list(range(streams))
    while waiting or guessing.speaking:
        for slot in guessing.free:
            if waiting:
                guessing.begin(slot, prompt, (waiting.pop(), 0), max_tokens=2)
        for spoken in guessing.tick():
            drawn.append(guessing.take(spoken.slot).ids)
    first = np.array([ids[len(prompt)] for ids in drawn])
    probability_V = np.exp(nano.predictions(params, np.array(drawn[0][: len(prompt) + 1]))[-1])
    count_V = np.bincount(first, minlength=len(probability_V))
    deviation_V = np.sqrt(streams * probability_V * (1 - probability_V))
    assert np.all(np.abs(count_V - streams * probability_V) < 5 * deviation_V + 1)
