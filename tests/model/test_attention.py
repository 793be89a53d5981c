"""Attention of packed rows: the derivative that is written out is that of the attention itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memsearcher_jax.model.attention import attend, attend_to_row


def row_of(T, dtype="float32", *, B=2, N=6, K=2, H=8):
    """Queries, keys, values, and segments of which the last is padding."""
    draw = np.random.default_rng(T)
    q_BNTH, k_BKTH, v_BKTH = (jnp.asarray(draw.standard_normal((B, n, T, H)), dtype) for n in (N, K, K))
    segment_BT = np.sort(draw.integers(1, 4, (B, T)))
    segment_BT[:, -T // 5 :] = 0
    return q_BNTH, k_BKTH, v_BKTH, jnp.asarray(segment_BT, jnp.int32)


def gradients(attention, q_BNTH, k_BKTH, v_BKTH, segment_BT):
    """What the attention gives, and the derivatives of a sum of it with weights of its own for each number."""
    weight_BNTH = jnp.asarray(np.random.default_rng(0).standard_normal(q_BNTH.shape), jnp.float32)

    def loss(*qkv):
        mixed_BNTH = attention(*qkv, segment_BT)
        return jnp.sum(weight_BNTH * mixed_BNTH), mixed_BNTH

    (_, mixed_BNTH), by_qkv = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(q_BNTH, k_BKTH, v_BKTH)
    return mixed_BNTH, by_qkv


@pytest.mark.parametrize("T", [1, 50, 128, 384, 1_100])
def test_its_gradient_is_that_of_the_plain_attention(T):
    row = row_of(T)
    (mixed, ours), (plain_mixed, plain) = gradients(attend_to_row, *row), gradients(attend, *row)
    np.testing.assert_allclose(mixed, plain_mixed, rtol=1e-5, atol=1e-6)
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_in_bfloat16_it_is_as_near_as_numbers_of_that_type_are():
    q_BNTH, k_BKTH, v_BKTH, segment_BT = row_of(256, "bfloat16")
    exact = gradients(attend, *(x.astype(jnp.float32) for x in (q_BNTH, k_BKTH, v_BKTH)), segment_BT)[1]
    ours = gradients(attend_to_row, q_BNTH, k_BKTH, v_BKTH, segment_BT)[1]
    for one, other in zip(ours, exact, strict=True):
        assert one.dtype == jnp.bfloat16
        assert np.linalg.norm(one.astype(jnp.float32) - other) < 0.01 * np.linalg.norm(other)


def test_nothing_flows_between_texts_of_a_row():
    q_BNTH, k_BKTH, v_BKTH, segment_BT = row_of(256)
    first_BT = segment_BT == 1

    def loss(q_BNTH, k_BKTH, v_BKTH):
        return jnp.sum(jnp.where(first_BT[:, None, :, None], attend_to_row(q_BNTH, k_BKTH, v_BKTH, segment_BT), 0))

    for gradient in jax.grad(loss, argnums=(0, 1, 2))(q_BNTH, k_BKTH, v_BKTH):
        flows_BT = jnp.any(gradient != 0, axis=(1, 3))
        assert not np.any(flows_BT & ~first_BT) and np.any(flows_BT)


@pytest.mark.parametrize("names", [(), ("attention",)], ids=str)
def test_computed_again_it_gives_the_same(names):
    row = row_of(256)
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    again = gradients(jax.checkpoint(attend_to_row, policy=policy), *row)[1]
    for one, other in zip(again, gradients(attend_to_row, *row)[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
