"""Pallas kernels for TPUs over the page pool of the KV cache: attention, and appending. Arrays are those of one device.

A page table names the pages of each context, in order. The pools hold all layers and stay in HBM; a kernel copies the
pages that it needs to VMEM, the next ones while it computes. Pages past a context's length are never read.

Pools are k_LPKHE and v_LPKEH, and in int8 also scale_LPK2E. Scores are multiplied by the scales of keys, and their
weights by those of values, so that no page is converted to another scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memsearcher_jax.ops.attention import NEG_INF, OnlineSoftmax, einsum_f32
from memsearcher_jax.ops.quantization import rounded

GROUP_HEADS = 8
"""Chunks are computed in groups with up to this many (chunk, kv head) pairs, so that one waits less for another."""

GROUP_QUERIES = 64
"""Queries of a kv head that a group may have together; at least those of one chunk."""

BLOCK_ENTRIES = 512
"""Entries of each context that are copied together."""

VMEM_BYTES = 64 << 20

LANES = 128
"""If the last dimension of an array is smaller, the compiler stores another dimension last, to avoid padding."""

HBM = pl.BlockSpec(memory_space=pltpu.HBM)


class NewTokens(NamedTuple):
    """What no page holds yet, for a group of R chunks."""

    cos_R1h: Any
    sin_R1h: Any
    k_RK1H: Any  # the chunk's own token
    v_RK1H: Any
    k_RKJH: Any  # the decode buffer
    v_RKJH: Any


def paged_attention(
    q_AKQWH: Array, pools: Sequence[Array], layer: Array, page_table_AI: Array, length_A: Array
) -> OnlineSoftmax:
    """Attention of A chunks of W queries over the first `length_A` entries of their contexts, in one layer.

    Values must be finite everywhere. The softmax of a chunk with length 0 has the maximum NEG_INF, so that
    `attention.combine` ignores it.
    """
    where = (layer, page_table_AI, length_A, jnp.int32(0))
    max_AKM1, sum_AKM1, acc_AKMH = _attention(q_AKQWH, pools, where, None)
    shape = q_AKQWH.shape
    return OnlineSoftmax(max_AKM1.reshape(shape[:4]), sum_AKM1.reshape(shape[:4]), acc_AKMH.reshape(shape))


def decode_attention(
    rotation: tuple[Array, Array],
    q_AKQ1H: Array,
    new: Sequence[Array],
    pools: Sequence[Array],
    layer: Array,
    used: Array,
    page_table_AI: Array,
    length_A: Array,
) -> tuple[Array, Array, Array]:
    """(out_AKQ1H, k_AK1H, v_AK1H): as `paged_attention`, also over the decode buffer and the chunk's own token.

    `new`: k_AK1H and v_AK1H of the own token, k_LAKJH and v_LAKJH of the decode buffer. Of the decode buffer the first
    `used` entries are read. Queries and keys are rotated by (cos_A1h, sin_A1h) first, and values masked; the keys and
    values returned are those of the own token, as `kv_cache.mask_nonfinite_values`, `rope.apply_rope` and, in
    int8, `quantization.rounded` make them.
    """
    where = (layer, page_table_AI, length_A, used)
    out_AKMH, k_AK1H, v_AK1H = _attention(q_AKQ1H, pools, where, NewTokens(*rotation, *new))
    return out_AKMH.reshape(q_AKQ1H.shape), k_AK1H, v_AK1H


def _attention(
    q_AKQWH: Array, pools: Sequence[Array], where: tuple[Array, Array, Array, Array], new: NewTokens | None
) -> list[Array]:
    layer, page_table_AI, length_A, used = where
    A, K, Q, W, H = q_AKQWH.shape
    context_pages, E, M = page_table_AI.shape[1], pools[0].shape[4], Q * W
    pools = [pools[0], _as_stored(pools[1], H), *pools[2:]]
    limit = max(1, min(GROUP_HEADS // K, GROUP_QUERIES // M))
    R = next(rows for rows in range(limit, 0, -1) if A % rows == 0)
    block_pages = max(1, min(BLOCK_ENTRIES // E, context_pages))
    scalars = (jnp.stack([layer, used]), page_table_AI.reshape(-1), length_A)

    def rows(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((R, *shape), lambda group, *_: (group, *[0] * len(shape)))

    def rows_of_layer(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, R, *shape), lambda group, at, *_: (at[0], group, *[0] * len(shape)))

    if new is None:
        new_specs, results, dtype = None, [(M, 1), (M, 1), (M, H)], jnp.float32
    else:
        own, buffer = rows(K, 1, H), rows_of_layer(K, new.k_RKJH.shape[3], H)
        new_specs = NewTokens(rows(1, H // 2), rows(1, H // 2), own, own, buffer, buffer)
        results, dtype = [(M, H), (1, H), (1, H)], q_AKQWH.dtype
    (out,) = pl.pallas_call(
        partial(_attention_kernel, context_pages=context_pages, block_pages=block_pages),
        out_shape=([jax.ShapeDtypeStruct((A, K, *shape), dtype) for shape in results],),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(A // R,),
            in_specs=[rows(K, M, H), [HBM for _ in pools], new_specs],
            out_specs=([rows(K, *shape) for shape in results],),
            scratch_shapes=[
                [pltpu.VMEM((2, R, block_pages, *pool.shape[2:]), pool.dtype) for pool in pools],
                *[pltpu.VMEM((R, K, M, size), jnp.float32) for size in (1, 1, H)],
                pltpu.VMEM((R, K, M, H), q_AKQWH.dtype),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
        name="paged_attention" if new is None else "decode_attention",
    )(*scalars, q_AKQWH.reshape(A, K, M, H), pools, new)
    return out


def _attention_kernel(
    at_2: Any,  # the layer, and the entries of the decode buffer
    page_table: Any,  # the rows of page_table_AI, one after the other
    length_A: Any,
    q_RKMH: Any,
    pools: Sequence[Any],  # values [E, H] or [H, E], see `_as_stored`
    new: NewTokens | None,
    results: Sequence[Any],
    buffers: Sequence[Any],  # for each pool, of two blocks of pages: one is copied while the other is read
    max_RKM1: Any,
    sum_RKM1: Any,
    acc_RKMH: Any,
    rotated_RKMH: Any,
    buffer_1: Any,
    copied_2: Any,
    *,
    context_pages: int,
    block_pages: int,
):
    R, _, _, H = q_RKMH.shape
    E, is_int8 = pools[0].shape[4], len(pools) == 3
    group, groups = pl.program_id(0), pl.num_programs(0)

    def blocks_of(group: Any) -> Any:
        """Blocks of pages of the group's longest chunk."""
        longest = functools.reduce(jnp.maximum, [length_A[group * R + r] for r in range(R)])
        return pl.cdiv(longest, block_pages * E)

    def first_with_pages(group: Any) -> Any:
        """The first group from `group` on that reads pages, or `groups`."""

        def is_empty(group: Any) -> Any:
            return (group < groups) & (blocks_of(jnp.minimum(group, groups - 1)) == 0)

        return jax.lax.while_loop(is_empty, lambda group: group + 1, group)

    def copies(group: Any, block: Any, buffer: Any, act: Callable[[Any], None]) -> None:
        def of_page(r: Any, page: int) -> None:
            chunk, number = group * R + r, block * block_pages + page

            @pl.when(number * E < length_A[chunk])
            def _():
                source = at_2[0], page_table[chunk * context_pages + number]
                for pool, copied in zip(pools, buffers, strict=True):
                    act(pltpu.make_async_copy(pool.at[source], copied.at[buffer, r, page], copied_2.at[buffer]))

        def of_chunk(r: Any, _: None) -> None:
            for page in range(block_pages):
                of_page(r, page)

        jax.lax.fori_loop(0, R, of_chunk, None)

    def start(group: Any, block: Any, buffer: Any) -> None:
        copies(group, block, buffer, lambda copy: copy.start())

    def attend(
        r: int,
        score_KMC: Array,
        mask_C: Array,
        values: Sequence[Array],
        v_axes: str = "KCH",
        value_scales: Sequence[Array] = (),
    ) -> None:
        """Adds keys, whose values are in blocks of equal size, to the softmax."""
        score_KMC = jnp.where(mask_C, score_KMC * H**-0.5, NEG_INF)
        old_KM1 = max_RKM1[r]
        max_KM1 = jnp.maximum(old_KM1, jnp.max(score_KMC, axis=-1, keepdims=True))
        weight_KMC, scale_KM1 = jnp.exp(score_KMC - max_KM1), jnp.exp(old_KM1 - max_KM1)
        acc_KMH, size = scale_KM1 * acc_RKMH[r], score_KMC.shape[2] // len(values)
        for i, value in enumerate(values):
            part_KMC = weight_KMC[..., i * size : (i + 1) * size]
            if value_scales:
                part_KMC = part_KMC * value_scales[i]
            acc_KMH += einsum_f32(f"KMC,{v_axes}->KMH", part_KMC.astype(value.dtype), value)
        max_RKM1[r] = max_KM1
        sum_RKM1[r] = scale_KM1 * sum_RKM1[r] + jnp.sum(weight_KMC, axis=-1, keepdims=True)
        acc_RKMH[r] = acc_KMH

    @pl.when(group == 0)
    def _():
        buffer_1[0] = 0
        # Entries that were never copied are masked, but multiplied by 0: their values, or the scales of these.
        buffers[-1][...] = jnp.zeros_like(buffers[-1])
        first = first_with_pages(0)
        pl.when(first < groups)(lambda: start(first, 0, 0))

    max_RKM1[...] = jnp.full_like(max_RKM1, NEG_INF)
    sum_RKM1[...] = jnp.zeros_like(sum_RKM1)
    acc_RKMH[...] = jnp.zeros_like(acc_RKMH)
    if new is not None:
        out_RKMH, k_RK1H, v_RK1H = results
        J = new.k_RKJH.shape[2]
        is_used_1J = jax.lax.broadcasted_iota(jnp.int32, (1, J), 1) < at_2[1]
        for r in range(R):
            cos_1H = jnp.concatenate([new.cos_R1h[r]] * 2, axis=-1)
            sin_1H = jnp.concatenate([-new.sin_R1h[r], new.sin_R1h[r]], axis=-1)
            value_K1H = new.v_RK1H[r]
            is_finite_K1H = jnp.abs(value_K1H.astype(jnp.float32)) < jnp.inf
            is_finite_K11 = jnp.min(is_finite_K1H.astype(jnp.float32), axis=-1, keepdims=True) > 0
            key_K1H = jnp.where(is_finite_K11, _rotate(new.k_RK1H[r], cos_1H, sin_1H), jnp.nan).astype(k_RK1H.dtype)
            value_K1H = jnp.where(is_finite_K11, value_K1H.astype(jnp.float32), 0.0).astype(value_K1H.dtype)
            if is_int8:
                key_K1H, value_K1H = rounded(key_K1H), rounded(value_K1H)
            k_RK1H[r], v_RK1H[r] = key_K1H, value_K1H
            rotated_RKMH[r] = _rotate(q_RKMH[r], cos_1H, sin_1H).astype(rotated_RKMH.dtype)
            attend(r, einsum_f32("KMH,KWH->KMW", rotated_RKMH[r], key_K1H), jnp.full((1, 1), True), [value_K1H])
            score_KMJ = einsum_f32("KMH,KJH->KMJ", rotated_RKMH[r], new.k_RKJH[r])
            attend(r, score_KMJ, is_used_1J, [new.v_RKJH[r]])
        q_RKMH = rotated_RKMH

    blocks, following = blocks_of(group), first_with_pages(group + 1)

    def attend_to_block(block: Any, _: None) -> None:
        buffer = buffer_1[0]
        is_last = block == blocks - 1
        next_group = jnp.where(is_last, following, group)
        pl.when(next_group < groups)(lambda: start(next_group, jnp.where(is_last, 0, block + 1), 1 - buffer))
        copies(group, block, buffer, lambda copy: copy.wait())
        entry_1C = block * block_pages * E + jax.lax.broadcasted_iota(jnp.int32, (1, block_pages * E), 1)
        for r in range(R):
            keys, values, *scales = ([copied[buffer, r, i] for i in range(block_pages)] for copied in buffers)
            if is_int8:
                keys, values = ([x.astype(q_RKMH.dtype) for x in pages] for pages in (keys, values))
            scores_KME = [einsum_f32("KMH,KHE->KME", q_RKMH[r], k_KHE) for k_KHE in keys]
            value_scales = []
            for scales_K2E in scales:
                scores_KME = [x_KME * scale_K2E[:, :1] for x_KME, scale_K2E in zip(scores_KME, scales_K2E, strict=True)]
                value_scales = [scale_K2E[:, 1:] for scale_K2E in scales_K2E]
            is_cached_1C, v_axes = entry_1C < length_A[group * R + r], "KCH" if H >= LANES else "KHC"
            attend(r, jnp.concatenate(scores_KME, axis=-1), is_cached_1C, values, v_axes, value_scales)
        buffer_1[0] = 1 - buffer

    jax.lax.fori_loop(0, blocks, attend_to_block, None)
    if new is not None:
        out_RKMH[...] = (acc_RKMH[...] / sum_RKM1[...]).astype(out_RKMH.dtype)
    else:
        for result, x in zip(results, (max_RKM1, sum_RKM1, acc_RKMH), strict=True):
            result[...] = x[...]


def _rotate(x_KMH: Array, cos_MH: Array, sin_MH: Array) -> Array:
    low_KMh, high_KMh = jnp.split(x_KMH.astype(jnp.float32), 2, axis=-1)
    swapped_KMH = jnp.concatenate([high_KMh, low_KMh], axis=-1)
    return x_KMH.astype(jnp.float32) * cos_MH + swapped_KMH * sin_MH


def append_to_pages(
    pools: tuple[Array, ...], new: tuple[Array, ...], page_table_AI: Array, start_A: Array, added_A: Array
) -> tuple[Array, ...]:
    """The pools, updated in place: the first `added_A` tokens of each chunk become entries start, start + 1, ...

    `new`: keys and values [L, A, K, W, H], and scales [L, A, K, W, 2]. Tokens past the last page are dropped. Chunks
    are appended one after the other, so that several may share a page. Values must be finite, and so must the keys of a
    token, unless all are NaN.
    """
    A, H = new[0].shape[1], new[0].shape[4]
    # With 2 as the last dimension the compiler would pad each pair of scales to a whole row of lanes.
    new = (*new[:2], *(jnp.swapaxes(x_LAKW2, 3, 4) for x_LAKW2 in new[2:]))
    stored = [pools[0], _as_stored(pools[1], H), *pools[2:]]
    chunks = [pl.BlockSpec((x.shape[0], None, *x.shape[2:]), lambda chunk, *_: (0, chunk, 0, 0, 0)) for x in new]
    scalars = (page_table_AI.reshape(-1), start_A, added_A)
    k_LPKHE, v_LPK, *scales = pl.pallas_call(
        partial(_append_kernel, context_pages=page_table_AI.shape[1]),
        out_shape=[[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in stored]],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(A,),
            in_specs=[chunks, [HBM for _ in stored]],
            out_specs=[[HBM for _ in stored]],
            scratch_shapes=[
                [pltpu.VMEM((pool.shape[0], *pool.shape[2:]), pool.dtype) for pool in stored],
                pltpu.SemaphoreType.DMA((len(stored),)),
            ],
        ),
        input_output_aliases={len(scalars) + len(new) + i: i for i in range(len(stored))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
        name="append_to_pages",
    )(*scalars, list(new), stored)[0]
    return k_LPKHE, _as_stored(v_LPK, H), *scales


def _append_kernel(
    page_table: Any,  # the rows of page_table_AI, one after the other
    start_A: Any,
    added_A: Any,
    new: Sequence[Any],
    _: Sequence[Any],
    pools: Sequence[Any],  # values [E, H] or [H, E], see `_as_stored`
    pages: Sequence[Any],
    copied: Any,
    *,
    context_pages: int,
):
    (L, _, W, H), E = new[0].shape, pages[0].shape[3]
    chunk = pl.program_id(0)
    start, added = start_A[chunk], added_A[chunk]
    first = start // E

    def write_page(reached: Any, _: None) -> None:
        page, offset = page_table[chunk * context_pages + first + reached], start - (first + reached) * E
        places = [(pool.at[:, page], x, copied.at[i]) for i, (pool, x) in enumerate(zip(pools, pages, strict=True))]
        _copy_all([pltpu.make_async_copy(*place) for place in places])

        def place(entry_axis: int, token_axis: int) -> Array:
            """Which token goes to which entry: a 0-1 matrix, whose products are exact."""
            shape = (W, E) if entry_axis else (E, W)
            token = jax.lax.broadcasted_iota(jnp.int32, shape, token_axis)
            return (jax.lax.broadcasted_iota(jnp.int32, shape, entry_axis) == offset + token) & (token < added)

        def is_new(shape: tuple[int, int], entry_axis: int) -> Array:
            token = jax.lax.broadcasted_iota(jnp.int32, shape, entry_axis) - offset
            return (token >= 0) & (token < added)

        def last(new_KWH: Array, old_KHE: Array) -> Array:
            """The page, whose entries are its last dimension, with the new tokens."""
            is_nan_KWE = place(1, 0) & jnp.isnan(new_KWH[..., :1].astype(jnp.float32))
            nan_K1E = jnp.max(is_nan_KWE.astype(jnp.float32), axis=1, keepdims=True)
            placed_KHE = _place("KWH,WE->KHE", jnp.where(jnp.isnan(new_KWH), 0, new_KWH), place(1, 0))
            return jnp.where(is_new((1, E), 1), jnp.where(nan_K1E > 0, jnp.nan, placed_KHE), old_KHE)

        def scales(new_K2W: Array, old_K2E: Array) -> Array:
            """As `last`; a NaN is that of a key alone."""
            is_nan_K2W = jnp.isnan(new_K2W)
            placed_K2E = _place("KXW,WE->KXE", jnp.where(is_nan_K2W, 0, new_K2W), place(1, 0))
            nan_K2E = _place("KXW,WE->KXE", is_nan_K2W.astype(jnp.float32), place(1, 0))
            return jnp.where(is_new((1, E), 1), jnp.where(nan_K2E > 0, jnp.nan, placed_K2E), old_K2E)

        def write_layer(layer: Any, _: None) -> None:
            (k_KWH, v_KWH), (k_LKHE, v_LK) = (_as_float(x[layer]) for x in new[:2]), pages[:2]
            old_KHE, old_K = _as_float(k_LKHE[layer]), _as_float(v_LK[layer])
            k_LKHE[layer] = last(k_KWH, old_KHE).astype(k_LKHE.dtype)
            if H < LANES:
                v_LK[layer] = last(v_KWH, old_K).astype(v_LK.dtype)
            else:
                placed_KEH = _place("KWH,EW->KEH", v_KWH, place(0, 1))
                v_LK[layer] = jnp.where(is_new((E, 1), 0), placed_KEH, old_K).astype(v_LK.dtype)
            for new_LK2W, scale_LK2E in zip(new[2:], pages[2:], strict=True):
                scale_LK2E[layer] = scales(new_LK2W[layer], scale_LK2E[layer])

        jax.lax.fori_loop(0, L, write_layer, None)
        _copy_all([pltpu.make_async_copy(x, pool, copied) for pool, x, copied in places])

    reach = jnp.where(added > 0, (start + added - 1) // E - first + 1, 0)
    jax.lax.fori_loop(0, jnp.minimum(reach, context_pages - first), write_page, None)


def _place(subscripts: str, new_KWH: Array, place: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if new_KWH.dtype == jnp.float32 else None
    return einsum_f32(subscripts, new_KWH, place.astype(new_KWH.dtype), precision=precision)


def _as_float(x: Array) -> Array:
    """int8 as bfloat16, in which its products with 0 and 1 are exact."""
    return x.astype(jnp.bfloat16) if x.dtype == jnp.int8 else x


def _copy_all(copies: Sequence[Any]) -> None:
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()


def _as_stored(v_LPK: Array, head_size: int) -> Array:
    """The values with the last dimensions as the compiler stores them, [E, H] or [H, E]; and back."""
    return v_LPK if head_size >= LANES else jnp.swapaxes(v_LPK, 3, 4)
