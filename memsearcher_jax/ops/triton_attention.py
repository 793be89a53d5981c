"""Pallas kernels for GPUs, lowered through Triton: attention over packed rows, its derivative, and over cached pages.

Arrays are those of one device. No kernel writes scores to memory: each keeps those of one block of queries and one of
keys in registers. JAX's own kernels and cuDNN do not fit: neither takes the mask of a shared prefix (cuDNN only as a
bias with an entry for each query and key), and their paged attention reads one layer's pool and does not return the
softmax that attention to the decode buffer is combined with. Blocks are those of Triton's fused attention tutorial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from memsearcher_jax.ops.attention import (
    NEG_INF,
    OnlineSoftmax,
    Visible,
    combine,
    normalized_softmax,
    recomputed_attention,
)
from memsearcher_jax.ops.axes import shard_map_per_device

MIN_BLOCK, MAX_BLOCK = 16, 128
"""Rows of a block: a product in Triton has at least 16; its sizes are powers of two. In float32 half as many."""

FORWARD_BLOCK, BACKWARD_BLOCK = 64, 32
"""Rows of the other operand that a step of a kernel's loop reads."""

PROGRAMS, MAX_SHARES = 256, 8
"""Programs that keep a large GPU busy: the pages of a context are divided among several while there are fewer."""

HEADS = ("batch", "heads", None, None)
ROW_AXES = HEADS, *[("batch", "kv", None, None)] * 2, Visible._make((("batch", None), ("batch",)))
"""Logical axes of queries, keys, values and what each query sees."""

LOG2_E = math.log2(math.e)


def triton_attention(q_BNTH: Array, k_BKTH: Array, v_BKTH: Array, visible: Visible) -> Array:
    """`attention.packed_attention` by kernels; on a mesh each device runs them on its own rows and heads.

    Raises ValueError for rows or heads that no block divides.
    """
    attention = shard_map_per_device(partial(recomputed_attention, _forward, _backward), ROW_AXES, HEADS)
    return attention(q_BNTH, k_BKTH, v_BKTH, visible)


def triton_softmax(q_BNTH: Array, k_BKTH: Array, v_BKTH: Array, segment_BT: Array) -> OnlineSoftmax:
    """Attention within segments by the same kernel, to be combined with that to other keys. It has no gradient."""
    out_shapes = q_BNTH.shape, q_BNTH.shape[:3]
    attention = shard_map_per_device(_forward, ROW_AXES, (HEADS, HEADS[:3]), out_shapes)
    out_BNTH, logsumexp_BNT = attention(q_BNTH, k_BKTH, v_BKTH, Visible.of_segments(segment_BT))
    return normalized_softmax(out_BNTH, logsumexp_BNT, k_BKTH)


def _forward(q_BNTH: Array, k_BKTH: Array, v_BKTH: Array, visible: Visible) -> tuple[Array, Array]:
    """(out_BNTH, logsumexp_BNT float32)."""
    B, N, T, H = q_BNTH.shape
    K = k_BKTH.shape[1]
    Q = _block(T, MAX_BLOCK // (q_BNTH.dtype.itemsize // 2), H)
    queries, keys, offsets, prefix = _query_specs(Q, T, H, N // K)
    out_BNTH, logsumexp_BNT = _call(
        partial(_forward_kernel, C=min(Q, FORWARD_BLOCK)),
        (T // Q, N, B),
        [queries, keys, keys, offsets, prefix],
        [queries, pl.BlockSpec((None, None, Q), lambda block, n, b: (b, n, block))],
        [(q_BNTH.shape, q_BNTH.dtype), (q_BNTH.shape[:3], jnp.float32)],
    )(q_BNTH, k_BKTH, v_BKTH, visible.offset_BT, visible.prefix_B[:, None])
    return out_BNTH, logsumexp_BNT


def _backward(
    dout_BNTH: Array,
    q_BNTH: Array,
    k_BKTH: Array,
    v_BKTH: Array,
    visible: Visible,
    out_BNTH: Array,
    logsumexp_BNT: Array,
) -> tuple[Array, Array, Array]:
    """(dq_BNTH, dk_BKTH, dv_BKTH), by one kernel over blocks of queries and one over blocks of keys."""
    (offset_BT, prefix_B), (B, N, T, H) = visible, q_BNTH.shape
    K, G = k_BKTH.shape[1], N // k_BKTH.shape[1]
    Q = _block(T, MAX_BLOCK // (q_BNTH.dtype.itemsize // 2), H)
    C = min(Q, BACKWARD_BLOCK)
    delta_BNT = jnp.sum(dout_BNTH.astype(jnp.float32) * out_BNTH, axis=-1)
    queries, keys, offsets, prefix = _query_specs(Q, T, H, G)
    per_query = pl.BlockSpec((None, None, Q), lambda block, n, b: (b, n, block))
    (dq_BNTH,) = _call(
        partial(_query_gradient_kernel, C=C),
        (T // Q, N, B),
        [queries, keys, keys, offsets, prefix, queries, per_query, per_query],
        [queries],
        [(q_BNTH.shape, q_BNTH.dtype)],
    )(q_BNTH, k_BKTH, v_BKTH, offset_BT, prefix_B[:, None], dout_BNTH, logsumexp_BNT, delta_BNT)
    # The last query that sees a key of each block: all see the prefix.
    end_C1 = jnp.arange(1, T // Q + 1)[:, None] * Q
    sees_BCT = (offset_BT + prefix_B[:, None])[:, None] < end_C1
    sees_BCT |= end_C1 - Q < prefix_B[:, None, None]
    end_BC = jnp.max(jnp.where(sees_BCT, jnp.arange(1, T + 1), 0), axis=2).astype(jnp.int32)
    group = pl.BlockSpec((None, G, T, H), lambda block, k, b: (b, k, 0, 0))
    per_group = pl.BlockSpec((None, G, T), lambda block, k, b: (b, k, 0))
    block = pl.BlockSpec((None, None, Q, H), lambda block, k, b: (b, k, block, 0))
    row = pl.BlockSpec((None, T), lambda block, k, b: (b, 0))
    end = pl.BlockSpec((None, 1), lambda block, k, b: (b, block))
    dk_BKTH, dv_BKTH = _call(
        partial(_key_gradient_kernel, C=C),
        (T // Q, K, B),
        [group, block, block, row, prefix, end, group, per_group, per_group],
        [block, block],
        [(k_BKTH.shape, k_BKTH.dtype)] * 2,
    )(q_BNTH, k_BKTH, v_BKTH, offset_BT, prefix_B[:, None], end_BC, dout_BNTH, logsumexp_BNT, delta_BNT)
    return dq_BNTH, dk_BKTH, dv_BKTH


def _block(tokens: int, largest: int, head_size: int) -> int:
    """The largest block that divides rows or pages of so many tokens. Raises ValueError if there is none."""
    block = math.gcd(tokens, largest)
    if block < MIN_BLOCK or head_size < MIN_BLOCK or head_size & (head_size - 1):
        raise ValueError(
            f"rows or pages of {tokens} tokens, heads of {head_size}: on a GPU {MIN_BLOCK} must divide "
            "training.seq_len and sampling.page_tokens, and model.head_size must be 16, 32, 64, 128 or 256"
        )
    return block


def _query_specs(Q: int, T: int, H: int, G: int) -> tuple[pl.BlockSpec, ...]:
    """Of queries, keys, offsets and the prefix, for a grid of blocks of queries, heads and rows."""
    return (
        pl.BlockSpec((None, None, Q, H), lambda block, n, b: (b, n, block, 0)),
        pl.BlockSpec((None, None, T, H), lambda block, n, b: (b, n // G, 0, 0)),
        pl.BlockSpec((None, Q), lambda block, n, b: (b, block)),
        pl.BlockSpec((None, 1), lambda block, n, b: (b, 0)),
    )


def _call(
    kernel: Callable,
    grid: tuple[int, ...],
    in_specs: list[Any],
    out_specs: list[Any],
    results: list[tuple[tuple[int, ...], Any]],
) -> Callable[..., list[Array]]:
    head_size = in_specs[0].block_shape[-1]
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(*result) for result in results],
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        compiler_params=triton.CompilerParams(num_warps=4 if head_size <= 64 else 8, num_stages=2),
        name=kernel.func.__name__.strip("_"),
    )


def _sees(own_Q: Array, query_Q: Array, prefix: Array, key_C: Array) -> Array:
    """sees_QC: the keys of the prefix and those from `own_Q` on, up to the query itself."""
    return (key_C <= query_Q[:, None]) & ((key_C >= own_Q[:, None]) | (key_C < prefix))


def _needed_keys(own_Q: Array, prefix: Array, end: Array, C: int) -> tuple[Array, Callable[[Array], Array]]:
    """(blocks of keys before `end` that a block of queries sees, a function from 0, 1, ... to their first keys)."""
    blocks = pl.cdiv(end, C)
    of_prefix = jnp.minimum(pl.cdiv(prefix, C), blocks)
    first_own = jnp.maximum(jnp.min(own_Q) // C, of_prefix)
    count = of_prefix + jnp.maximum(blocks - first_own, 0)
    return count, lambda index: jnp.where(index < of_prefix, index, index - of_prefix + first_own) * C


def _add(
    softmax: tuple[Array, Array, Array], score_QC: Array, v_CH: Array, value_scale: Array | float = 1.0
) -> tuple[Array, Array, Array]:
    """(max_Q, sum_Q, acc_QH) with more keys; scores and maximum are in units of log 2."""
    old_Q, sum_Q, acc_QH = softmax
    max_Q = jnp.maximum(old_Q, jnp.max(score_QC, axis=1))
    weight_QC, scale_Q = jnp.exp2(score_QC - max_Q[:, None]), jnp.exp2(old_Q - max_Q)
    acc_QH = scale_Q[:, None] * acc_QH + triton.dot((weight_QC * value_scale).astype(v_CH.dtype), v_CH)
    return max_Q, scale_Q * sum_Q + jnp.sum(weight_QC, axis=1), acc_QH


def _no_keys(Q: int, H: int) -> tuple[Array, Array, Array]:
    return jnp.full(Q, NEG_INF, jnp.float32), jnp.zeros(Q, jnp.float32), jnp.zeros((Q, H), jnp.float32)


def _forward_kernel(q_QH, k_TH, v_TH, offset_Q, prefix_1, out_QH, logsumexp_Q, *, C: int):
    (Q, H), first, prefix = q_QH.shape, pl.program_id(0) * q_QH.shape[0], prefix_1[0]
    queries_QH, query_Q, own_Q = q_QH[...], first + jnp.arange(Q), offset_Q[...] + prefix
    count, first_key = _needed_keys(own_Q, prefix, first + Q, C)

    def add_keys(index: Array, softmax: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        start = first_key(index)
        score_QC = triton.dot(queries_QH, k_TH[pl.ds(start, C), :].T) * (H**-0.5 * LOG2_E)
        sees_QC = _sees(own_Q, query_Q, prefix, start + jnp.arange(C))
        return _add(softmax, jnp.where(sees_QC, score_QC, NEG_INF), v_TH[pl.ds(start, C), :])

    max_Q, sum_Q, acc_QH = jax.lax.fori_loop(0, count, add_keys, _no_keys(Q, H))
    out_QH[...] = (acc_QH / sum_Q[:, None]).astype(out_QH.dtype)
    logsumexp_Q[...] = max_Q / LOG2_E + jnp.log(sum_Q)


def _gradients(
    q_QH: Array, k_CH: Array, v_CH: Array, dout_QH: Array, sees_QC: Array, logsumexp_Q: Array, delta_Q: Array
) -> tuple[Array, Array]:
    """(probabilities, gradients of the scores q · k), both float32."""
    scale = q_QH.shape[1] ** -0.5
    score_QC = jnp.where(sees_QC, triton.dot(q_QH, k_CH.T) * (scale * LOG2_E), NEG_INF)
    prob_QC = jnp.exp2(score_QC - logsumexp_Q[:, None] * LOG2_E)
    return prob_QC, prob_QC * (triton.dot(dout_QH, v_CH.T) - delta_Q[:, None]) * scale


def _query_gradient_kernel(q_QH, k_TH, v_TH, offset_Q, prefix_1, dout_QH, logsumexp_Q, delta_Q, dq_QH, *, C: int):
    (Q, H), first, prefix = q_QH.shape, pl.program_id(0) * q_QH.shape[0], prefix_1[0]
    queries_QH, query_Q, own_Q = q_QH[...], first + jnp.arange(Q), offset_Q[...] + prefix
    gradients_QH, logsumexps_Q, deltas_Q = dout_QH[...], logsumexp_Q[...], delta_Q[...]
    count, first_key = _needed_keys(own_Q, prefix, first + Q, C)

    def add_keys(index: Array, sum_QH: Array) -> Array:
        start = first_key(index)
        k_CH, v_CH = k_TH[pl.ds(start, C), :], v_TH[pl.ds(start, C), :]
        sees_QC = _sees(own_Q, query_Q, prefix, start + jnp.arange(C))
        _, dscore_QC = _gradients(queries_QH, k_CH, v_CH, gradients_QH, sees_QC, logsumexps_Q, deltas_Q)
        return sum_QH + triton.dot(dscore_QC.astype(k_CH.dtype), k_CH)

    dq_QH[...] = jax.lax.fori_loop(0, count, add_keys, jnp.zeros((Q, H), jnp.float32)).astype(dq_QH.dtype)


def _key_gradient_kernel(
    q_GTH, k_QH, v_QH, offset_T, prefix_1, end_1, dout_GTH, logsumexp_GT, delta_GT, dk_QH, dv_QH, *, C: int
):
    """The gradient of Q keys, over blocks of C queries of all heads that read them."""
    (Q, H), first, prefix = k_QH.shape, pl.program_id(0) * k_QH.shape[0], prefix_1[0]
    keys_QH, values_QH, key_Q = k_QH[...], v_QH[...], first + jnp.arange(Q)
    blocks = pl.cdiv(end_1[0] - first, C)

    def add_queries(index: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        head, start = index // blocks, first + index % blocks * C
        queries = pl.ds(start, C)
        q_CH, dout_CH = q_GTH[head, queries, :], dout_GTH[head, queries, :]
        sees_CQ = _sees(offset_T[queries] + prefix, start + jnp.arange(C), prefix, key_Q)
        per_query = logsumexp_GT[head, queries], delta_GT[head, queries]
        prob_CQ, dscore_CQ = _gradients(q_CH, keys_QH, values_QH, dout_CH, sees_CQ, *per_query)
        dk_QH = sums[0] + triton.dot(dscore_CQ.astype(q_CH.dtype).T, q_CH)
        return dk_QH, sums[1] + triton.dot(prob_CQ.astype(q_CH.dtype).T, dout_CH)

    zeros_QH = jnp.zeros((Q, H), jnp.float32)
    sums = jax.lax.fori_loop(0, blocks * q_GTH.shape[0], add_queries, (zeros_QH, zeros_QH))
    dk_QH[...], dv_QH[...] = (x.astype(dk_QH.dtype) for x in sums)


def paged_attention(
    q_AKGWH: Array, pools: Sequence[Array], layer: Array, page_table_AN: Array, length_A: Array
) -> OnlineSoftmax:
    """Attention of A chunks of W queries over the first `length_A` entries of their contexts, in one layer.

    `pools`: k_LPKHE and v_LPKEH, in int8 also scale_LPK2E. Each program reads a share of a context's pages, each entry
    once, in place. Values must be finite everywhere. The softmax of a chunk with length 0 has the maximum NEG_INF, so
    that `combine` ignores it.
    """
    A, K, G, W, H = q_AKGWH.shape
    N, E, M = page_table_AN.shape[1], pools[1].shape[3], G * W
    C = _block(E, FORWARD_BLOCK, H)
    Q = min(max(pl.next_power_of_2(M), MIN_BLOCK), FORWARD_BLOCK)
    blocks = pl.cdiv(M, Q)
    q_AKMH = jnp.pad(q_AKGWH.reshape(A, K, M, H), ((0, 0), (0, 0), (0, blocks * Q - M), (0, 0)))
    S = max(1, min(N, MAX_SHARES, PROGRAMS // (A * K * blocks)))

    def results(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, Q, *shape), lambda s, block, k, a: (s, a, k, block, *[0] * len(shape)))

    shape = (S, A, K, blocks * Q)
    softmax = _call(
        partial(_paged_kernel, C=C),
        (S, blocks, K, A),
        [
            pl.BlockSpec((None, None, Q, H), lambda s, block, k, a: (a, k, block, 0)),
            [pl.BlockSpec() for _ in pools],
            pl.BlockSpec((1,), lambda *_: (0,)),
            pl.BlockSpec((None, N), lambda s, block, k, a: (a, 0)),
            pl.BlockSpec((1,), lambda s, block, k, a: (a,)),
        ],
        [results(), results(), results(H)],
        [(shape, jnp.float32), (shape, jnp.float32), ((*shape, H), jnp.float32)],
    )(q_AKMH, list(pools), layer[None], page_table_AN, length_A)
    shares = (
        OnlineSoftmax(*(x[share, :, :, :M].reshape(A, K, G, W, *x.shape[4:]) for x in softmax)) for share in range(S)
    )
    return combine(list(shares))


def _paged_kernel(q_QH, pools, layer_1, page_N, length_1, max_Q, sum_Q, acc_QH, *, C: int):
    (k_LPKHE, v_LPKEH, *scale_LPK2E), dtype = pools, q_QH.dtype
    (Q, H), E, kv_head = q_QH.shape, v_LPKEH.shape[3], pl.program_id(2)
    queries_QH, layer, length = q_QH[...], layer_1[0], length_1[0]
    blocks = pl.cdiv(length, C)
    share = pl.cdiv(blocks, pl.num_programs(0))
    first = pl.program_id(0) * share

    def add_keys(index: Array, softmax: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        start = index * C
        page, entries = page_N[start // E], pl.ds(start % E, C)
        k_HC, v_CH = k_LPKHE[layer, page, kv_head, :, entries], v_LPKEH[layer, page, kv_head, entries, :]
        score_QC = triton.dot(queries_QH, k_HC.astype(dtype)) * (H**-0.5 * LOG2_E)
        value_scale_1C = 1.0
        for scale in scale_LPK2E:
            key_scale_C, value_scale_C = (scale[layer, page, kv_head, i, entries] for i in range(2))
            score_QC, value_scale_1C = score_QC * key_scale_C[None], value_scale_C[None]
        is_cached_1C = (start + jnp.arange(C) < length)[None]
        return _add(softmax, jnp.where(is_cached_1C, score_QC, NEG_INF), v_CH.astype(dtype), value_scale_1C)

    softmax = jax.lax.fori_loop(first, jnp.minimum(first + share, blocks), add_keys, _no_keys(Q, H))
    # NEG_INF stays what it is: in other units it would not be the maximum that `combine` ignores.
    max_Q[...] = jnp.where(softmax[0] > NEG_INF, softmax[0] / LOG2_E, NEG_INF)
    sum_Q[...], acc_QH[...] = softmax[1:]


def append_to_pages(
    pools: tuple[Array, ...], new: tuple[Array, ...], page_table_AN: Array, start_A: Array, added_A: Array
) -> tuple[Array, ...]:
    """The pools with the first `added_A` tokens of each chunk at entries start, start + 1, ... of its context.

    Tokens past the last page are dropped. One scatter: a GPU does it in place, where a loop would wait for the host.
    """
    N, P, E = page_table_AN.shape[1], pools[1].shape[1], pools[1].shape[3]
    token_W = jnp.arange(new[0].shape[3])
    entry_AW = start_A[:, None] + token_W
    page_AW = jnp.take_along_axis(page_table_AN, jnp.minimum(entry_AW // E, N - 1), axis=1)
    page_AW = jnp.where((token_W < added_A[:, None]) & (entry_AW < N * E), page_AW, P)  # out of range: dropped
    where = (slice(None), page_AW, slice(None))

    def write(pool: Array, x_LAKWH: Array, *between: slice) -> Array:
        x_AWLKH = jnp.transpose(x_LAKWH, (1, 3, 0, 2, 4))
        return pool.at[(*where, *between, entry_AW % E)].set(x_AWLKH, mode="drop")

    keys, values, *scales = zip(pools, new, strict=True)
    return write(*keys, slice(None)), write(*values), *(write(*pair, slice(None)) for pair in scales)
