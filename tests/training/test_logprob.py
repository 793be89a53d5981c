"""Chunked log-probabilities against whole logits, and that whole logits never exist."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from memsearcher_jax.model import qwen
from memsearcher_jax.training.logprob import make_reference, token_logprobs


def test_packed_and_chunked_equals_alone_and_whole(nano):
    params, rows, temperature = nano.params(), nano.batch, 0.7
    score = jax.jit(partial(token_logprobs, model_config=nano.model, chunk=8, temperature=temperature))
    alone = jax.jit(qwen.forward, static_argnums=1)
    logprob_BT, entropy_BT = map(np.asarray, score(params, rows=rows))
    assert not logprob_BT[~rows.mask_BT].any() and not entropy_BT[~rows.mask_BT].any()

    places = {(row, rows.segment_BT[row, t]) for row, t in np.argwhere(rows.segment_BT)}
    assert len(places) == len(nano.samples)
    for row, segment in places:
        place = row, rows.segment_BT[row] == segment
        ids_T, length = rows.ids_BT[place], place[1].sum()
        ids_1T = np.pad(ids_T, (0, nano.training.row_tokens - length))[None]
        position_1T = np.arange(ids_1T.size)[None]
        logits_1TV, _ = alone(params, nano.model, ids_1T, position_1T, np.int32(position_1T < length))
        log_probability_TV = np.asarray(jax.nn.log_softmax(logits_1TV[0] / temperature))[: length - 1]
        expected_T = np.take_along_axis(log_probability_TV, ids_T[1:, None], axis=1)[:, 0]
        trained_T = rows.mask_BT[place][1:]
        np.testing.assert_allclose(logprob_BT[place][1:][trained_T], expected_T[trained_T], atol=1e-5)
        expected_T = -np.sum(np.exp(log_probability_TV) * log_probability_TV, axis=-1)
        np.testing.assert_allclose(entropy_BT[place][1:][trained_T], expected_T[trained_T], atol=1e-5)


def gradient(nano, params, chunk):
    def loss(params):
        logprob_BT, entropy_BT = token_logprobs(params, nano.model, nano.batch, chunk=chunk, temperature=1.0)
        return jnp.sum(logprob_BT * nano.batch.mask_BT) + jnp.sum(entropy_BT)

    return jax.grad(loss)(params)


def test_the_gradient_does_not_depend_on_the_chunk(nano):
    params = nano.params()
    whole, chunked = (jax.jit(partial(gradient, nano, chunk=n))(params) for n in (nano.training.row_tokens, 8))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), whole, chunked)


def test_chunks_of_what_is_not_trained_are_not_computed(nano):
    """Weights of the output layer that are not numbers are not touched where nothing is trained."""
    untied = replace(nano.model, tied=False)
    params = jax.device_get(jax.jit(qwen.init, static_argnums=1)(jax.random.key(0), untied))
    params["unembed"] = np.full_like(params["unembed"], np.nan)
    rows = replace(nano.batch, mask_BT=np.zeros_like(nano.batch.mask_BT))

    def loss(params, rows):
        return sum(map(jnp.sum, token_logprobs(params, untied, rows, chunk=8, temperature=1.0)))

    value, gradients = jax.value_and_grad(loss)(params, rows)
    assert value == 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
    assert not np.isfinite(loss(params, nano.batch))


def sizes(jaxpr):
    """Elements of every intermediate array, inner programs included."""
    for equation in jaxpr.eqns:
        yield from (v.aval.size for v in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from sizes(inner)


@pytest.mark.parametrize("chunk", [8, 32])
def test_whole_logits_never_exist_forward_or_backward(nano, chunk):
    wide = replace(nano, model=replace(nano.model, vocab_size=4096))
    params = jax.eval_shape(wide.params)
    largest = max(sizes(jax.make_jaxpr(partial(gradient, wide, chunk=chunk))(params).jaxpr))
    tokens = nano.batch.ids_BT.size
    # With a chunk as long as a row the whole logits do exist, so this test sees them.
    assert (largest >= tokens * 4096) == (chunk == nano.training.row_tokens)


def test_the_reference_scores_all_rows_some_at_a_time(nano):
    params = nano.params()
    few, all_rows = (
        make_reference(nano.model, chunk=16, temperature=1.0, rows_at_once=n)(params, nano.batch) for n in (2, 16)
    )
    np.testing.assert_allclose(few, all_rows, atol=1e-5)
    assert np.count_nonzero(few) > 0
