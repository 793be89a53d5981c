"""Rotary positions and grouped-query attention: the one place that a faster kernel has to replace."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def rotary_angles(position_BT: jax.Array, head_size: int, theta: float) -> jax.Array:
    """angle_BTh, float32, for the h = H / 2 pairs of a head: position * theta^(-2 i / H). Su et al. 2021, eq. 15."""
    frequency_h = theta ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    return position_BT[..., None].astype(jnp.float32) * frequency_h


def rotate(x_BNTH: jax.Array, angle_BTh: jax.Array) -> jax.Array:
    """Turns each pair (i, i + H / 2) of a head by its angle; Qwen pairs the halves, not the neighbours."""
    cos_B1Th, sin_B1Th = jnp.cos(angle_BTh)[:, None], jnp.sin(angle_BTh)[:, None]
    low_BNTh, high_BNTh = jnp.split(x_BNTH.astype(jnp.float32), 2, axis=-1)
    turned = (low_BNTh * cos_B1Th - high_BNTh * sin_B1Th, high_BNTh * cos_B1Th + low_BNTh * sin_B1Th)
    return jnp.concatenate(turned, axis=-1).astype(x_BNTH.dtype)


Past = tuple[jax.Array, jax.Array, jax.Array]
"""(k_BKSH, v_BKSH, visible_B1S): keys and values of earlier tokens, and which of them a row's tokens may look at."""

QUERY_BLOCK = 128
"""Tokens whose scores over the past exist at one time: what bounds the memory of prefill."""


def attend(
    q_BNTH: jax.Array,
    k_BKTH: jax.Array,
    v_BKTH: jax.Array,
    segment_BT: jax.Array,
    past: Sequence[Past] = (),
) -> jax.Array:
    """out_BNTH: each token looks at the tokens of its segment up to itself, and at all that is visible in the past.

    Query head n reads kv head n // (N / K); keys and values are never repeated. Padding (segment 0) sees padding and
    the past only, so no row of the softmax is empty. Scores and the softmax are float32.
    """
    B, N, T, H = q_BNTH.shape
    q_BKGTH = q_BNTH.reshape(B, -1, N // k_BKTH.shape[1], T, H)
    causal_TT = jnp.tril(jnp.ones((T, T), bool))
    visible_BTT = causal_TT & (segment_BT[:, :, None] == segment_BT[:, None, :])

    def mix(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        q_BKGtH, visible_BtT = block
        return _mix(q_BKGtH, [(k_BKTH, v_BKTH, visible_BtT), *past])

    if past and T > QUERY_BLOCK and T % QUERY_BLOCK == 0:
        blocks = (_split(q_BKGTH, axis=3), _split(visible_BTT, axis=1))
        mixed_BKGTH = jnp.moveaxis(jax.lax.map(mix, blocks), 0, 3).reshape(q_BKGTH.shape)
    else:
        mixed_BKGTH = mix((q_BKGTH, visible_BTT))
    return mixed_BKGTH.reshape(B, N, T, H)


def _split(x: jax.Array, axis: int) -> jax.Array:
    """The axis of T tokens cut into blocks, which come first."""
    shape = (*x.shape[:axis], -1, QUERY_BLOCK, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _mix(q_BKGTH: jax.Array, parts: Sequence[Past]) -> jax.Array:
    """One softmax over parts that stay apart: joining them would copy the cache, or the scores over it."""
    scores = [_scores(q_BKGTH, k_BKSH, visible_BTS) for k_BKSH, _, visible_BTS in parts]
    top_BKGT1 = jnp.max(jnp.stack([jnp.max(s_BKGTS, axis=-1) for s_BKGTS in scores]), axis=0)[..., None]
    weights = [jnp.exp(s_BKGTS - jax.lax.stop_gradient(top_BKGT1)) for s_BKGTS in scores]
    total_BKGT1 = sum(jnp.sum(w_BKGTS, axis=-1, keepdims=True) for w_BKGTS in weights)
    mixed_BKGTH = sum(
        jnp.einsum("BKGTS,BKSH->BKGTH", w_BKGTS.astype(v_BKSH.dtype), v_BKSH, preferred_element_type=jnp.float32)
        for w_BKGTS, (_, v_BKSH, _) in zip(weights, parts, strict=True)
    )
    return (mixed_BKGTH / total_BKGT1).astype(q_BKGTH.dtype)


def _scores(q_BKGTH: jax.Array, k_BKSH: jax.Array, visible_BTS: jax.Array) -> jax.Array:
    """Scaled q · k in float32; the lowest finite number where hidden, because inf - inf would poison a gradient."""
    score_BKGTS = jnp.einsum("BKGTH,BKSH->BKGTS", q_BKGTH, k_BKSH, preferred_element_type=jnp.float32)
    score_BKGTS *= q_BKGTH.shape[-1] ** -0.5
    return jnp.where(visible_BTS[:, None, None], score_BKGTS, jnp.finfo(jnp.float32).min)
