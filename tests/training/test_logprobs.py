"""Chunked log-probabilities against full logits, which never exist in the chunked program."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from scipy.special import log_softmax

from memsearcher_jax.model import qwen
from memsearcher_jax.training.logprobs import token_logprobs, top_tokens


def test_packed_rows_in_chunks_equal_single_contexts_with_full_logits(nano):
    params, rows, temperature = nano.params(), nano.batch, 0.7
    score = jax.jit(partial(token_logprobs, model_config=nano.model, chunk=8, temperature=temperature))
    alone = jax.jit(qwen.forward, static_argnums=1)
    logprob_BT, entropy_BT, _ = map(np.asarray, score(params, batch=rows))
    assert not logprob_BT[~rows.mask_BT].any() and not entropy_BT[~rows.mask_BT].any()

    places = {(row, rows.segment_BT[row, t]) for row, t in np.argwhere(rows.segment_BT)}
    assert len(places) == len(nano.examples)
    for row, segment in places:
        place = row, rows.segment_BT[row] == segment
        ids_T, length = rows.ids_BT[place], place[1].sum()
        ids_1T = np.pad(ids_T, (0, nano.training.seq_len - length))[None]
        position_1T = np.arange(ids_1T.size)[None]
        logits_1TV, _ = alone(params, nano.model, ids_1T, position_1T, np.int32(position_1T < length))
        log_probability_TV = log_softmax(np.asarray(logits_1TV)[0] / temperature, axis=-1)[: length - 1]
        expected_T = np.take_along_axis(log_probability_TV, ids_T[1:, None], axis=1)[:, 0]
        trained_T = rows.mask_BT[place][1:]
        np.testing.assert_allclose(logprob_BT[place][1:][trained_T], expected_T[trained_T], atol=1e-5)
        expected_T = -np.sum(np.exp(log_probability_TV) * log_probability_TV, axis=-1)
        np.testing.assert_allclose(entropy_BT[place][1:][trained_T], expected_T[trained_T], atol=1e-5)


def gradient(nano, params, chunk):
    def loss(params):
        scores = token_logprobs(params, nano.model, nano.batch, chunk=chunk, temperature=1.0)
        return sum(jnp.sum(x_BT * nano.batch.mask_BT) for x_BT in scores)

    return jax.grad(loss)(params)


def test_the_gradient_by_hand_is_that_of_full_logits(nano):
    """Of the sampled tokens, of the entropies, and of a teacher's tokens."""
    rng, shape = np.random.default_rng(0), (*nano.batch.ids_BT.shape, 3)
    ids_BTK, weight_BTK = rng.integers(0, nano.model.vocab_size, shape), rng.random(shape, np.float32)
    rows = replace(nano.batch, teacher_ids_BTK=ids_BTK, teacher_probability_BTK=weight_BTK)
    nano = replace(nano, batch=rows)

    def loss(params):
        logits_BTV, _ = qwen.forward(params, nano.model, rows.ids_BT, rows.position_BT, rows.segment_BT)
        logprob_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
        logprob_BT = jnp.take_along_axis(logprob_BTV, rows.ids_BT[:, 1:, None], axis=2)[..., 0]
        entropy_BT = -jnp.sum(jnp.exp(logprob_BTV) * logprob_BTV, axis=2)
        teacher_BTK = weight_BTK[:, 1:] * jnp.take_along_axis(logprob_BTV, ids_BTK[:, 1:], axis=2)
        return jnp.sum((logprob_BT + entropy_BT + jnp.sum(teacher_BTK, axis=2)) * rows.mask_BT[:, 1:])

    plain, chunked = jax.jit(lambda params: (jax.grad(loss)(params), gradient(nano, params, chunk=8)))(nano.params())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), chunked, plain)


def test_the_most_likely_tokens_are_those_of_full_logits(nano):
    rows = nano.batch
    ids_BTK, probability_BTK = jax.jit(top_tokens, static_argnums=(1, 3), static_argnames=("chunk", "temperature"))(
        nano.params(), nano.model, rows, 4, chunk=8, temperature=0.7
    )
    logits_BTV, _ = qwen.forward(nano.params(), nano.model, rows.ids_BT, rows.position_BT, rows.segment_BT)
    expected_BTK, expected_ids_BTK = jax.lax.top_k(jax.nn.softmax(logits_BTV[:, :-1] / 0.7), 4)
    trained_BT = rows.mask_BT[:, 1:]
    np.testing.assert_array_equal(ids_BTK[:, 1:][trained_BT], expected_ids_BTK[trained_BT])
    np.testing.assert_allclose(probability_BTK[:, 1:][trained_BT], expected_BTK[trained_BT], rtol=1e-4)
    assert not np.any(np.asarray(probability_BTK)[~rows.mask_BT])


def test_chunks_without_trained_tokens_are_not_computed(nano):
    """NaN weights of the output layer have no effect without trained tokens."""
    untied = replace(nano.model, tie_embeddings=False)
    params = jax.device_get(jax.jit(qwen.init, static_argnums=1)(jax.random.key(0), untied))
    params["unembed"] = np.full_like(params["unembed"], np.nan)
    rows = replace(nano.batch, mask_BT=np.zeros_like(nano.batch.mask_BT))

    def loss(params, rows):
        return sum(map(jnp.sum, token_logprobs(params, untied, rows, chunk=8, temperature=1.0)))

    loss_and_gradients = jax.jit(jax.value_and_grad(loss))
    value, gradients = jax.device_get(loss_and_gradients(params, rows))
    assert value == 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
    assert not np.isfinite(float(loss_and_gradients(params, nano.batch)[0]))


def sizes(jaxpr):
    """Elements of every intermediate array, inner programs included."""
    for equation in jaxpr.eqns:
        yield from (v.aval.size for v in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from sizes(inner)


@pytest.mark.parametrize("chunk", [8, 32])
def test_full_logits_never_exist_forward_or_backward(nano, chunk):
    wide = replace(nano, model=replace(nano.model, vocab_size=4096))
    params = jax.eval_shape(wide.params)
    maximum = max(sizes(jax.make_jaxpr(partial(gradient, wide, chunk=chunk))(params).jaxpr))
    tokens = nano.batch.ids_BT.size
    # With a chunk as long as a row the full logits exist, which proves that this test detects them.
    assert (maximum >= tokens * 4096) == (chunk == nano.training.seq_len)
