"""Rotary positions and grouped-query attention: the one place that a faster kernel has to replace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name


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

ROW_SCORES = 2**21
"""Of rows that train, so many scores are worked out at one time, of at least one row."""

LOWEST = jnp.finfo(jnp.float32).min
"""The score of what is hidden. A finite number, because inf - inf would poison a gradient."""

SAVED = "attention"
"""Name under which a remat policy finds what attention gave, without which the backward pass would run it again."""


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
    q_BKGTH = _by_kv_head(q_BNTH, k_BKTH)
    own = _look_at_own(q_BKGTH, k_BKTH, v_BKTH, segment_BT)
    mixed_BKGTH = join([own, *(part(q_BKGTH) for part in past)])
    return mixed_BKGTH.reshape(q_BNTH.shape).astype(q_BNTH.dtype)


@jax.custom_vjp
def attend_to_row(q_BNTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """`attend` without a past, to be trained through: the backward pass works the scores out again, block by block.

    So no score is kept. Its derivative is that of Dao et al. 2022, algorithm 4, written so that of the products no one
    asks for scores that lie across: a CPU would copy them first, number by number.
    """
    return _attend_to_row_forward(q_BNTH, k_BKTH, v_BKTH, segment_BT)[0]


def _attend_to_row_forward(*qkv_and_segment: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    saved = [checkpoint_name(x, SAVED) for x in _few_rows_at_once(_mix_rows, *qkv_and_segment)]
    return saved[0], (*qkv_and_segment, *saved)


def _attend_to_row_backward(saved: tuple[jax.Array, ...], by_mixed_BNTH: jax.Array) -> tuple[jax.Array | None, ...]:
    return *_few_rows_at_once(_differentiate_rows, by_mixed_BNTH, *saved), None


attend_to_row.defvjp(_attend_to_row_forward, _attend_to_row_backward)


def _few_rows_at_once(function: Callable, *arrays: jax.Array) -> Sequence[jax.Array]:
    """`function` of arrays [B, ...], the first [B, N, T, H], on so many rows that a block has at most ROW_SCORES."""
    B, N, T, _ = arrays[0].shape
    first, end = _blocks(T)[0]
    most = ROW_SCORES // (N * (end - first) * T)
    rows = max(rows for rows in range(1, B + 1) if rows == 1 or (B % rows == 0 and rows <= most))
    if rows == B:
        return function(*arrays)
    groups = [x.reshape(B // rows, rows, *x.shape[1:]) for x in arrays]
    return [x.reshape(B, *x.shape[2:]) for x in jax.lax.map(lambda group: function(*group), groups)]


def _mix_rows(
    q_BNTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, segment_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(mixed_BNTH, log_total_BKGT: the logarithm of the sum of the exponentials of a query's scores)."""
    own = _look_at_own(_by_kv_head(q_BNTH, k_BKTH), k_BKTH, v_BKTH, segment_BT)
    return join([own]).reshape(q_BNTH.shape).astype(q_BNTH.dtype), own.top_BKGT + jnp.log(own.total_BKGT)


def _differentiate_rows(
    by_mixed_BNTH: jax.Array,
    q_BNTH: jax.Array,
    k_BKTH: jax.Array,
    v_BKTH: jax.Array,
    segment_BT: jax.Array,
    mixed_BNTH: jax.Array,
    log_total_BKGT: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(by_q_BNTH, by_k_BKTH, by_v_BKTH). With w the weights, o what they mix and g its gradient: by v = w' g,
    by score = w (g v' - g · o)."""
    q_BKGTH, mixed_BKGTH, by_mixed_BKGTH = (_by_kv_head(x, k_BKTH) for x in (q_BNTH, mixed_BNTH, by_mixed_BNTH))
    k_BKHT, v_BKHT = jnp.swapaxes(k_BKTH, 2, 3), jnp.swapaxes(v_BKTH, 2, 3)
    visible_BTT = _visible(segment_BT)
    product_BKGT1 = jnp.sum(by_mixed_BKGTH.astype(jnp.float32) * mixed_BKGTH, axis=-1, keepdims=True)
    by_q, by_k_BKHT, by_v_BKHT = [], jnp.zeros(k_BKHT.shape, jnp.float32), jnp.zeros(v_BKHT.shape, jnp.float32)
    for first, end in _blocks(segment_BT.shape[1]):
        q_BKGtH, g_BKGtH = (x[:, :, :, first:end] for x in (q_BKGTH, by_mixed_BKGTH))
        score_BKGtS = _scores(q_BKGtH, k_BKHT[..., :end], visible_BTT[:, first:end, :end])
        weight_BKGtS = jnp.exp(score_BKGtS - log_total_BKGT[:, :, :, first:end, None])
        by_weight_BKGtS = _einsum("BKGtH,BKHS->BKGtS", g_BKGtH, v_BKHT[..., :end])
        by_score_BKGtS = weight_BKGtS * (by_weight_BKGtS - product_BKGT1[:, :, :, first:end]) * q_BNTH.shape[-1] ** -0.5
        weight_BKGtS, by_score_BKGtS = (x.astype(q_BNTH.dtype) for x in (weight_BKGtS, by_score_BKGtS))
        by_q.append(_einsum("BKGtS,BKSH->BKGtH", by_score_BKGtS, k_BKTH[:, :, :end]))
        by_k_BKHT = by_k_BKHT.at[..., :end].add(_einsum("BKGtH,BKGtS->BKHS", q_BKGtH, by_score_BKGtS))
        by_v_BKHT = by_v_BKHT.at[..., :end].add(_einsum("BKGtH,BKGtS->BKHS", g_BKGtH, weight_BKGtS))
    by_q_BNTH = jnp.concatenate(by_q, axis=3).reshape(q_BNTH.shape).astype(q_BNTH.dtype)
    by_k_BKTH, by_v_BKTH = (jnp.swapaxes(x, 2, 3).astype(k_BKTH.dtype) for x in (by_k_BKHT, by_v_BKHT))
    return by_q_BNTH, by_k_BKTH, by_v_BKTH


def look(q_BKGTH: jax.Array, k_BKHS: jax.Array, v_BKSH: jax.Array, visible_BTS: jax.Array) -> Partial:
    """The softmax of scaled q · k over S tokens. Where a query sees none of them, its weights are worth nothing.

    Keys lie across: with the tokens last, one score is a sum over rows of a matrix, which a CPU reads as it lies.
    """
    score_BKGTS = _scores(q_BKGTH, k_BKHS, visible_BTS)
    top_BKGT = jax.lax.stop_gradient(jnp.max(score_BKGTS, axis=-1))
    weight_BKGTS = jnp.exp(score_BKGTS - top_BKGT[..., None])
    mixed_BKGTH = _einsum("BKGTS,BKSH->BKGTH", weight_BKGTS.astype(v_BKSH.dtype), v_BKSH)
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


def _by_kv_head(x_BNTH: jax.Array, k_BKTH: jax.Array) -> jax.Array:
    """x_BKGTH: query heads in groups, of which each reads one head of keys."""
    B, N, T, H = x_BNTH.shape
    K = k_BKTH.shape[1]
    return x_BNTH.reshape(B, K, N // K, T, H)


def _visible(segment_BT: jax.Array) -> jax.Array:
    """visible_BTT: which tokens of its row each token sees."""
    T = segment_BT.shape[1]
    return jnp.tril(jnp.ones((T, T), bool)) & (segment_BT[:, :, None] == segment_BT[:, None, :])


def _blocks(T: int) -> list[tuple[int, int]]:
    """The first query of each block and the first behind it."""
    block = max(QUERY_BLOCK, T // BLOCKS)
    return [(0, T)] if T % block else [(first, first + block) for first in range(0, T, block)]


def _look_at_own(q_BKGTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, segment_BT: jax.Array) -> Partial:
    k_BKHT, visible_BTT = jnp.swapaxes(k_BKTH, 2, 3), _visible(segment_BT)
    parts = [
        look(q_BKGTH[:, :, :, first:end], k_BKHT[..., :end], v_BKTH[:, :, :end], visible_BTT[:, first:end, :end])
        for first, end in _blocks(segment_BT.shape[1])
    ]
    return Partial(*(jnp.concatenate(x, axis=3) for x in zip(*parts, strict=True)))


def _scores(q_BKGTH: jax.Array, k_BKHS: jax.Array, visible_BTS: jax.Array) -> jax.Array:
    """Scaled q · k, float32; LOWEST for what is hidden."""
    score_BKGTS = _einsum("BKGTH,BKHS->BKGTS", q_BKGTH, k_BKHS)
    return jnp.where(visible_BTS[:, None, None], score_BKGTS * q_BKGTH.shape[-1] ** -0.5, LOWEST)


def _einsum(subscripts: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *operands, preferred_element_type=jnp.float32)
