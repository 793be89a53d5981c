"""The TPU's attention kernel, interpreted on a CPU, against ours in plain XLA."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memsearcher_jax.model import attention, qwen, splash
from memsearcher_jax.model.config import ModelConfig


def packed(rows=2, heads=4, kv_heads=2, tokens=256, size=128):
    draw = np.random.default_rng(0)
    q_BNTH, k_BKTH, v_BKTH = (
        jnp.asarray(draw.standard_normal((rows, count, tokens, size)), jnp.float32)
        for count in (heads, kv_heads, kv_heads)
    )
    segment_BT = np.zeros((rows, tokens), np.int32)
    segment_BT[0, :100], segment_BT[0, 100:230] = 1, 2
    segment_BT[1, :256] = 1
    return q_BNTH, k_BKTH, v_BKTH, jnp.asarray(segment_BT)


def test_it_is_our_attention_forward_and_backward():
    """Several segments to a row, padding behind them, and more query heads than key heads."""
    *qkv, segment_BT = packed()
    real_B1T1 = (segment_BT > 0)[:, None, :, None]

    def loss(attend, q_BNTH, k_BKTH, v_BKTH):
        mixed_BNTH = jnp.where(real_B1T1, attend(q_BNTH, k_BKTH, v_BKTH, segment_BT), 0)
        return jnp.sum(jnp.sin(mixed_BNTH)), mixed_BNTH

    def kernel(*qkv_and_segment):
        return splash.attend(*qkv_and_segment, interpret=True)

    (_, ours), our_gradients = jax.value_and_grad(
        lambda *qkv: loss(attention.attend, *qkv), argnums=(0, 1, 2), has_aux=True
    )(*qkv)
    (_, theirs), their_gradients = jax.value_and_grad(lambda *qkv: loss(kernel, *qkv), argnums=(0, 1, 2), has_aux=True)(
        *qkv
    )
    np.testing.assert_allclose(theirs, ours, atol=1e-5)
    for mine, other in zip(our_gradients, their_gradients, strict=True):
        np.testing.assert_allclose(other, mine, rtol=1e-5, atol=2e-5)


def test_rows_that_no_block_divides_are_refused():
    q_BNTH, k_BKTH, v_BKTH, segment_BT = (x[..., :200, :] if x.ndim == 4 else x[:, :200] for x in packed())
    with pytest.raises(ValueError, match="rows of 200 tokens do not divide into blocks of 128"):
        splash.attend(q_BNTH, k_BKTH, v_BKTH, segment_BT, interpret=True)


def test_weights_are_declared_and_drawn_for_the_kernel_as_without_it():
    """Flax makes weights by a pass over a single token, which no block divides."""
    plain = ModelConfig(64, 16, 32, 2, 4, 2, 8, attention="xla")
    kernel = replace(plain, attention="splash")
    assert qwen.declared(kernel) == qwen.declared(plain)
    key = jax.random.key(0)
    jax.tree.map(np.testing.assert_array_equal, qwen.init(key, kernel), qwen.init(key, plain))
