"""Grouped-query attention in plain XLA, and the softmax over keys that several functions attend to.

CPUs and GPUs use it for everything; splash_attention.py and paged_attention.py have the kernels of TPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from memsearcher_jax.ops.axes import as_bits, from_bits, name_bits

QUERY_BLOCK = 128
MAX_QUERY_BLOCKS = 8
"""Queries are computed in blocks of at least QUERY_BLOCK, and in at most MAX_QUERY_BLOCKS blocks; a row that these do
not divide is one block. A block skips the keys after its last query: that saves nearly half of the scores of a long
row, and bounds how many exist at one time."""

PACKED_BLOCK = 128
"""Queries and keys of a block in training; a row that it does not divide is one block."""

NEG_INF = jnp.finfo(jnp.float32).min
"""The score of a masked position. It is finite, because a query that sees no key has this maximum, and -inf - -inf is
NaN."""

ATTENTION_OUTPUT = "attention"
"""Checkpoint name of what the backward pass of attention needs besides its inputs, for a remat policy."""


class OnlineSoftmax(NamedTuple):
    """The state of a softmax over part of the keys; `combine` merges the states of several parts."""

    max_BKQT: Array  # float32: the highest score
    sum_BKQT: Array  # float32: the sum of exp(score - max)
    acc_BKQTH: Array  # float32: the sum of exp(score - max) * value


class Visible(NamedTuple):
    """The keys of its row that each query sees: those before `prefix`, and those from offset + prefix up to itself.

    So a row can hold the common beginning of its contexts once. The first context is whole; every other one is only its
    own tokens, whose positions continue behind the prefix.
    """

    offset_BT: Array  # int32: index - position, that is, where the token's whole context would begin in the row
    prefix_B: Array  # int32: shared tokens at the beginning of the row

    @classmethod
    def of(cls, position_BT: Array, segment_BT: Array) -> Visible:
        """From packed rows: a segment whose positions begin at P > 0 continues the first P tokens of its row.

        All such segments of a row have the same P. Padding (segment 0) has position 0.
        """
        begins_BT = (segment_BT > 0) & (segment_BT != jnp.roll(segment_BT, 1, axis=1)).at[:, 0].set(True)
        offset_BT = jnp.arange(position_BT.shape[1], dtype=jnp.int32) - position_BT
        return cls(offset_BT, jnp.max(jnp.where(begins_BT, position_BT, 0), axis=1))

    @classmethod
    def of_segments(cls, segment_BT: Array) -> Visible:
        """Each token sees the adjacent tokens of its segment up to itself."""
        index_T = jnp.arange(segment_BT.shape[1], dtype=jnp.int32)
        begins_BT = (segment_BT != jnp.roll(segment_BT, 1, axis=1)).at[:, 0].set(True)
        offset_BT = jax.lax.cummax(jnp.where(begins_BT, index_T, 0), axis=1)
        return cls(offset_BT, jnp.zeros_like(offset_BT[:, 0]))


def packed_attention(q_BNTH: Array, k_BKTH: Array, v_BKTH: Array, visible: Visible) -> Array:
    """out_BNTH: attention over the keys that each query sees, for training. The output at padding is undefined.

    Blocks of scores that no query needs are skipped. The products are ordered so that none needs transposed scores,
    which a CPU would copy first.
    """
    return recomputed_attention(_forward, _backward, q_BNTH, k_BKTH, v_BKTH, visible)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def recomputed_attention(
    forward: Callable, backward: Callable, q_BNTH: Array, k_BKTH: Array, v_BKTH: Array, visible: Visible
) -> Array:
    """out_BNTH of forward(q, k, v, visible) -> (out, log-sum-exp of each query's scores); saves only these two.

    The backward pass recomputes the scores: backward(dout, q, k, v, visible, out, log-sum-exp) -> (dq, dk, dv). See
    Dao et al. 2022, algorithm 4.
    """
    return forward(q_BNTH, k_BKTH, v_BKTH, visible)[0]


def _save(forward: Callable, _: Callable, *arguments: Any) -> tuple[Array, tuple[Any, ...]]:
    saved = [name_bits(x, ATTENTION_OUTPUT) for x in forward(*arguments)]
    return saved[0], (*arguments, *saved)


def _recompute(_: Callable, backward: Callable, saved: tuple[Any, ...], dout_BNTH: Array) -> tuple[Array | None, ...]:
    return *backward(dout_BNTH, *saved), None


recomputed_attention.defvjp(_save, _recompute)


def _map_rows(function: Callable[..., Sequence[Array]], *arrays: Any) -> Sequence[Array]:
    """`function` of arrays [1, ...], for each row of arrays [B, ...].

    Of several rows together it would compute every block that one of them needs, and a CPU core's cache would not hold
    their scores.
    """
    if len(arrays[0]) == 1:
        return function(*arrays)

    def of_row(row: Any) -> Sequence[Array]:
        return function(*jax.tree.map(lambda x: x[None], row))

    return [x[:, 0] for x in jax.lax.map(of_row, arrays)]


def _forward_rows(q_BNTH: Array, k_BKTH: Array, v_BKTH: Array, visible: Visible) -> tuple[Array, Array]:
    """(out_BNTH, logsumexp_BKQT of each query's scores)."""
    q_BKQTH = group_heads(q_BNTH, k_BKTH)
    k_BKHT = jnp.swapaxes(k_BKTH, 2, 3)
    block = _block_size(q_BNTH.shape[2])

    def attend(number: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        q_BKQtH = _read_block(q_BKQTH, number, block)

        def add_keys(index: Array, softmax: OnlineSoftmax) -> OnlineSoftmax:
            keys = key_block(index)
            k_BKHY = _read_block(k_BKHT, keys, block, axis=3)
            v_BKYH = _read_block(v_BKTH, keys, block)
            mask_BtY = _visible_mask(visible, number, keys, block)
            return combine([softmax, partial_attention(q_BKQtH, k_BKHY, v_BKYH, mask_BtY)])

        count, key_block = _needed_key_blocks(visible, number, block)
        softmax = jax.lax.fori_loop(0, count, add_keys, empty(q_BKQtH))
        logsumexp_BKQt = softmax.max_BKQT + jnp.log(softmax.sum_BKQT)
        out_BKQTH, logsumexp_BKQT = results
        out_BKQTH = _write_block(out_BKQTH, normalize(softmax), number)
        return out_BKQTH, _write_block(logsumexp_BKQT, logsumexp_BKQt, number)

    zeros = (jnp.zeros(q_BKQTH.shape, jnp.float32), jnp.zeros(q_BKQTH.shape[:-1], jnp.float32))
    out_BKQTH, logsumexp_BKQT = jax.lax.fori_loop(0, q_BNTH.shape[2] // block, attend, zeros)
    return out_BKQTH.reshape(q_BNTH.shape).astype(q_BNTH.dtype), logsumexp_BKQT


def _backward_rows(
    dout_BNTH: Array,
    q_BNTH: Array,
    k_BKTH: Array,
    v_BKTH: Array,
    visible: Visible,
    out_BNTH: Array,
    logsumexp_BKQT: Array,
) -> tuple[Array, Array, Array]:
    """(dq_BNTH, dk_BKTH, dv_BKTH). With probabilities p: dv = p' dout, dscore = p (dout v' - dout · out)."""
    block = _block_size(q_BNTH.shape[2])
    dtype = q_BNTH.dtype
    q_BKQTH = group_heads(q_BNTH, k_BKTH)
    out_BKQTH = group_heads(out_BNTH, k_BKTH)
    dout_BKQTH = group_heads(dout_BNTH, k_BKTH)
    k_BKHT = jnp.swapaxes(k_BKTH, 2, 3)
    v_BKHT = jnp.swapaxes(v_BKTH, 2, 3)
    delta_BKQT = jnp.sum(dout_BKQTH.astype(jnp.float32) * out_BKQTH, axis=-1)

    def differentiate(number: Array, gradients: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        queries = (q_BKQTH, dout_BKQTH, logsumexp_BKQT, delta_BKQT)
        q_BKQtH, dout_BKQtH, logsumexp_BKQt, delta_BKQt = (_read_block(x, number, block, axis=3) for x in queries)

        def add_keys(index: Array, gradients: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq_BKQtH, dk_BKHT, dv_BKHT = gradients
            keys = key_block(index)
            k_BKHY = _read_block(k_BKHT, keys, block, axis=3)
            v_BKHY = _read_block(v_BKHT, keys, block, axis=3)
            score_BKQtY = _masked_scores(q_BKQtH, k_BKHY, _visible_mask(visible, number, keys, block))
            prob_BKQtY = jnp.exp(score_BKQtY - logsumexp_BKQt[..., None])
            dprob_BKQtY = einsum_f32("BKQtH,BKHY->BKQtY", dout_BKQtH, v_BKHY)
            dscore_BKQtY = prob_BKQtY * (dprob_BKQtY - delta_BKQt[..., None]) * q_BNTH.shape[-1] ** -0.5
            prob_BKQtY = prob_BKQtY.astype(dtype)
            dscore_BKQtY = dscore_BKQtY.astype(dtype)
            dq_BKQtH += einsum_f32("BKQtY,BKYH->BKQtH", dscore_BKQtY, _read_block(k_BKTH, keys, block, axis=2))
            dk_BKHT = _add_block(dk_BKHT, einsum_f32("BKQtH,BKQtY->BKHY", q_BKQtH, dscore_BKQtY), keys)
            dv_BKHT = _add_block(dv_BKHT, einsum_f32("BKQtH,BKQtY->BKHY", dout_BKQtH, prob_BKQtY), keys)
            return dq_BKQtH, dk_BKHT, dv_BKHT

        dq_BKQTH, dk_BKHT, dv_BKHT = gradients
        count, key_block = _needed_key_blocks(visible, number, block)
        zeros_BKQtH = jnp.zeros(q_BKQtH.shape, jnp.float32)
        dq_BKQtH, dk_BKHT, dv_BKHT = jax.lax.fori_loop(0, count, add_keys, (zeros_BKQtH, dk_BKHT, dv_BKHT))
        return _write_block(dq_BKQTH, dq_BKQtH, number), dk_BKHT, dv_BKHT

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q_BKQTH, k_BKHT, v_BKHT))
    dq_BKQTH, dk_BKHT, dv_BKHT = jax.lax.fori_loop(0, q_BNTH.shape[2] // block, differentiate, zeros)
    dk_BKTH = jnp.swapaxes(dk_BKHT, 2, 3).astype(dtype)
    dv_BKTH = jnp.swapaxes(dv_BKHT, 2, 3).astype(dtype)
    return dq_BKQTH.reshape(q_BNTH.shape).astype(dtype), dk_BKTH, dv_BKTH


_forward = partial(_map_rows, _forward_rows)
_backward = partial(_map_rows, _backward_rows)


def _block_size(T: int) -> int:
    """Queries and keys of a block of `packed_attention`."""
    return T if T % PACKED_BLOCK else PACKED_BLOCK


def _needed_key_blocks(visible: Visible, number: Array, block: int) -> tuple[Array, Callable[[Array], Array]]:
    """(how many blocks of keys some query of block `number` sees, a function from 0, 1, ... to their numbers)."""
    prefix_blocks = jnp.minimum(-(-jnp.max(visible.prefix_B) // block), number + 1)
    own_BT = _read_block(visible.offset_BT, number, block, axis=1) + visible.prefix_B[:, None]
    first_own = jnp.maximum(jnp.min(own_BT) // block, prefix_blocks)
    count = prefix_blocks + jnp.maximum(number + 1 - first_own, 0)
    return count, lambda index: jnp.where(index < prefix_blocks, index, index - prefix_blocks + first_own)


def _visible_mask(visible: Visible, number: Array, keys: Array, block: int) -> Array:
    """mask_BtY: which keys of block `keys` each query of block `number` sees."""
    position_t = jnp.arange(block, dtype=jnp.int32)
    key_Y = keys * block + position_t
    query_t1 = (number * block + position_t)[:, None]
    prefix_B11 = visible.prefix_B[:, None, None]
    own_Bt1 = _read_block(visible.offset_BT, number, block, axis=1)[..., None] + prefix_B11
    return (key_Y <= query_t1) & ((key_Y >= own_Bt1) | (key_Y < prefix_B11))


def _read_block(x: Array, number: Array, block: int, axis: int = -2) -> Array:
    return from_bits(jax.lax.dynamic_slice_in_dim(as_bits(x), number * block, block, axis))


def _write_block(x_BKQT: Array, new_BKQt: Array, number: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x_BKQT, new_BKQt, number * new_BKQt.shape[3], axis=3)


def _add_block(x_BKHT: Array, new_BKHY: Array, number: Array) -> Array:
    return _write_block(x_BKHT, _read_block(x_BKHT, number, new_BKHY.shape[3], axis=3) + new_BKHY, number)


def partial_attention(
    q_BKQTH: Array, k_BKHY: Array, v_BKYH: Array, mask_BTY: Array, scale_BK2Y: Array | None = None
) -> OnlineSoftmax:
    """Attention over Y keys; `mask_BTY` says which keys each query sees. Where it sees none, its part is ignored.

    Keys have the positions last: then a score is a sum over the rows of a matrix, which a CPU reads in memory order.
    `scale_BK2Y`: the scales of keys and of values in int8.
    """
    key_scale = 1.0
    value_scale = 1.0
    if scale_BK2Y is not None:
        key_scale = scale_BK2Y[:, :, None, None, 0]
        value_scale = scale_BK2Y[:, :, None, None, 1]
        k_BKHY = k_BKHY.astype(q_BKQTH.dtype)
        v_BKYH = v_BKYH.astype(q_BKQTH.dtype)
    score_BKQTY = _masked_scores(q_BKQTH, k_BKHY, mask_BTY, key_scale)
    max_BKQT = jnp.max(score_BKQTY, axis=-1)
    weight_BKQTY = jnp.exp(score_BKQTY - max_BKQT[..., None])
    acc_BKQTH = einsum_f32("BKQTY,BKYH->BKQTH", (weight_BKQTY * value_scale).astype(v_BKYH.dtype), v_BKYH)
    return OnlineSoftmax(max_BKQT, jnp.sum(weight_BKQTY, axis=-1), acc_BKQTH)


def empty(q_BKQTH: Array) -> OnlineSoftmax:
    """The softmax over no key: the neutral element of `combine`."""
    zero_BKQT = jnp.zeros(q_BKQTH.shape[:-1], jnp.float32)
    return OnlineSoftmax(zero_BKQT + NEG_INF, zero_BKQT, jnp.zeros(q_BKQTH.shape, jnp.float32))


def combine(parts: Sequence[OnlineSoftmax]) -> OnlineSoftmax:
    """One softmax over the keys of all parts (Milakov & Gimelshein 2018, section 3)."""
    if len(parts) == 1:
        return parts[0]
    max_BKQT = jnp.max(jnp.stack([part.max_BKQT for part in parts]), axis=0)
    scales = [jnp.exp(part.max_BKQT - max_BKQT) for part in parts]
    zero = jnp.zeros(())
    scaled = list(zip(scales, parts, strict=True))
    sum_BKQT = sum((scale * part.sum_BKQT for scale, part in scaled), zero)
    acc_BKQTH = sum((scale[..., None] * part.acc_BKQTH for scale, part in scaled), zero)
    return OnlineSoftmax(max_BKQT, sum_BKQT, acc_BKQTH)


def normalize(softmax: OnlineSoftmax) -> Array:
    """out_BKQTH, float32: the values averaged by the softmax."""
    return softmax.acc_BKQTH / softmax.sum_BKQT[..., None]


def normalized_softmax(out_BNTH: Array, logsumexp_BNT: Array, k_BKTH: Array) -> OnlineSoftmax:
    """The state of a softmax whose values are already averaged, from the log-sum-exp of each query's scores."""
    max_BKQT = group_heads(logsumexp_BNT, k_BKTH)
    return OnlineSoftmax(max_BKQT, jnp.ones_like(max_BKQT), group_heads(out_BNTH, k_BKTH).astype(jnp.float32))


def group_heads(x_BNTH: Array, k_BKTH: Array) -> Array:
    """x_BKQTH, or x_BKQT of x_BNT: the Q = N / K query heads of each kv head together."""
    return x_BNTH.reshape(len(x_BNTH), k_BKTH.shape[1], -1, *x_BNTH.shape[2:])


def self_attention(q_BKQTH: Array, k_BKTH: Array, v_BKTH: Array, segment_BT: Array) -> OnlineSoftmax:
    """Attention of each token to those of its segment up to itself."""
    T = segment_BT.shape[1]
    k_BKHT = jnp.swapaxes(k_BKTH, 2, 3)
    mask_BTT = jnp.tril(jnp.ones((T, T), bool)) & (segment_BT[:, :, None] == segment_BT[:, None, :])
    block = max(QUERY_BLOCK, T // MAX_QUERY_BLOCKS)
    block = T if T % block else block
    blocks = [
        partial_attention(
            q_BKQTH[:, :, :, end - block : end],
            k_BKHT[..., :end],
            v_BKTH[:, :, :end],
            mask_BTT[:, end - block : end, :end],
        )
        for end in range(block, T + 1, block)
    ]
    return OnlineSoftmax(*(jnp.concatenate(x, axis=3) for x in zip(*blocks, strict=True)))


def _masked_scores(q_BKQTH: Array, k_BKHY: Array, mask_BTY: Array, scale: Array | float = 1.0) -> Array:
    """Scaled q · k, float32; NEG_INF where masked."""
    score_BKQTY = einsum_f32("BKQTH,BKHY->BKQTY", q_BKQTH, k_BKHY) * (q_BKQTH.shape[-1] ** -0.5 * scale)
    return jnp.where(mask_BTY[:, None, None], score_BKQTY, NEG_INF)


def einsum_f32(subscripts: str, *operands: Array, **options: Any) -> Array:
    """`jnp.einsum` with a float32 result."""
    return jnp.einsum(subscripts, *operands, preferred_element_type=jnp.float32, **options)
