"""Rotary positions and grouped-query attention: the one place that a faster kernel has to replace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

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


class Partial(NamedTuple):
    """A softmax over some of the tokens that a query looks at; `join` makes one of several."""

    top_BKGT: jax.Array  # float32: the highest score
    total_BKGT: jax.Array  # float32: the sum of exp(score - top)
    mixed_BKGTH: jax.Array  # float32: the values' sum with these weights


Past = Callable[[jax.Array], Partial]
"""q_BKGTH -> the part of the softmax that lies over earlier tokens, of which any number may be visible, also none."""

QUERY_BLOCK, BLOCKS = 128, 8
"""Queries look at their own text so many at a time, or as many as make that many blocks, and never at what stands
behind the block: nearly half of the scores of a long text are not worked out, and few exist at one time."""

LOWEST = jnp.finfo(jnp.float32).min
"""The score of what is hidden. A finite number, because inf - inf would poison a gradient."""


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
    k_BKHT = jnp.swapaxes(k_BKTH, 2, 3)
    causal_TT = jnp.tril(jnp.ones((T, T), bool))
    visible_BTT = causal_TT & (segment_BT[:, :, None] == segment_BT[:, None, :])

    def look_at_own(first: int, end: int) -> Partial:
        visible_BtT = visible_BTT[:, first:end, :end]
        return look(q_BKGTH[:, :, :, first:end], k_BKHT[..., :end], v_BKTH[:, :, :end], visible_BtT)

    block = max(QUERY_BLOCK, T // BLOCKS)
    if T % block:
        own = look_at_own(0, T)
    else:
        parts = [look_at_own(first, first + block) for first in range(0, T, block)]
        own = Partial(*(jnp.concatenate(x, axis=3) for x in zip(*parts, strict=True)))
    mixed_BKGTH = join([own, *(part(q_BKGTH) for part in past)])
    return mixed_BKGTH.reshape(B, N, T, H).astype(q_BNTH.dtype)


def look(q_BKGTH: jax.Array, k_BKHS: jax.Array, v_BKSH: jax.Array, visible_BTS: jax.Array) -> Partial:
    """The softmax of scaled q · k over S tokens. Where a query sees none of them, its weights are worth nothing.

    Keys lie across: with the tokens last, one score is a sum over rows of a matrix, which a CPU reads as it lies.
    """
    score_BKGTS = jnp.einsum("BKGTH,BKHS->BKGTS", q_BKGTH, k_BKHS, preferred_element_type=jnp.float32)
    score_BKGTS = jnp.where(visible_BTS[:, None, None], score_BKGTS * q_BKGTH.shape[-1] ** -0.5, LOWEST)
    top_BKGT = jax.lax.stop_gradient(jnp.max(score_BKGTS, axis=-1))
    weight_BKGTS = jnp.exp(score_BKGTS - top_BKGT[..., None])
    mixed_BKGTH = jnp.einsum(
        "BKGTS,BKSH->BKGTH", weight_BKGTS.astype(v_BKSH.dtype), v_BKSH, preferred_element_type=jnp.float32
    )
    return Partial(top_BKGT, jnp.sum(weight_BKGTS, axis=-1), mixed_BKGTH)


def nothing(q_BKGTH: jax.Array) -> Partial:
    """The softmax over no token at all, which adds nothing to a merge."""
    number_BKGT = jnp.zeros(q_BKGTH.shape[:-1], jnp.float32)
    return Partial(number_BKGT + LOWEST, number_BKGT, jnp.zeros(q_BKGTH.shape, jnp.float32))


def merge(parts: Sequence[Partial]) -> Partial:
    """One softmax over all that the parts lie over (Milakov & Gimelshein 2018, section 3)."""
    top_BKGT = jnp.max(jnp.stack([part.top_BKGT for part in parts]), axis=0)
    scales = [jnp.exp(part.top_BKGT - top_BKGT) for part in parts]
    return Partial(
        top_BKGT,
        sum(scale * part.total_BKGT for scale, part in zip(scales, parts, strict=True)),
        sum(scale[..., None] * part.mixed_BKGTH for scale, part in zip(scales, parts, strict=True)),
    )


def join(parts: Sequence[Partial]) -> jax.Array:
    """mixed_BKGTH, float32: the values under one softmax over all that the parts lie over."""
    whole = merge(parts) if len(parts) > 1 else parts[0]
    return whole.mixed_BKGTH / whole.total_BKGT[..., None]
