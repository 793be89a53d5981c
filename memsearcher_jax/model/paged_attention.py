"""Pallas kernels for TPUs over the page pool of the KV cache: attention, and appending. Arrays are those of one device.

A page table names the pages of each context, in order. The pools hold all layers and stay in HBM; a kernel copies the
pages that it needs to VMEM, the next ones while it computes. Pages past a context's length are never read.
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

from memsearcher_jax.model.attention import NEG_INF, OnlineSoftmax, einsum_f32

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
    q_AKGWH: Array,
    k_LPKHE: Array,
    v_LPKEH: Array,
    layer: Array,
    page_table_AN: Array,
    length_A: Array,
    *,
    interpret: bool = False,
) -> OnlineSoftmax:
    """Attention of A chunks of W queries over the first `length_A` entries of their contexts, in one layer.

    Values must be finite everywhere. The softmax of a chunk with length 0 has the maximum NEG_INF, so that
    `attention.combine` ignores it.
    """
    where = (layer, page_table_AN, length_A, jnp.int32(0))
    max_AKM1, sum_AKM1, acc_AKMH = _attention(q_AKGWH, k_LPKHE, v_LPKEH, where, None, interpret)
    shape = q_AKGWH.shape
    return OnlineSoftmax(max_AKM1.reshape(shape[:4]), sum_AKM1.reshape(shape[:4]), acc_AKMH.reshape(shape))


def decode_attention(
    rotation: tuple[Array, Array],
    q_AKG1H: Array,
    k_AK1H: Array,
    v_AK1H: Array,
    k_LPKHE: Array,
    v_LPKEH: Array,
    k_LAKJH: Array,
    v_LAKJH: Array,
    layer: Array,
    used: Array,
    page_table_AN: Array,
    length_A: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """(out_AKG1H, k_AK1H, v_AK1H): as `paged_attention`, also over the decode buffer and the chunk's own token.

    Of the decode buffer the first `used` entries are read. Queries and keys are rotated by (cos_A1h, sin_A1h) first,
    and values masked; the keys and values returned are those of the own token, as `kv_cache.mask_nonfinite_values` and
    `attention.apply_rope` make them.
    """
    new = NewTokens(*rotation, k_AK1H, v_AK1H, k_LAKJH, v_LAKJH)
    where = (layer, page_table_AN, length_A, used)
    out_AKMH, k_AK1H, v_AK1H = _attention(q_AKG1H, k_LPKHE, v_LPKEH, where, new, interpret)
    return out_AKMH.reshape(q_AKG1H.shape), k_AK1H, v_AK1H


def _attention(
    q_AKGWH: Array,
    k_LPKHE: Array,
    v_LPKEH: Array,
    where: tuple[Array, Array, Array, Array],
    new: NewTokens | None,
    interpret: bool,
) -> list[Array]:
    layer, page_table_AN, length_A, used = where
    A, K, G, W, H = q_AKGWH.shape
    N, E, M = page_table_AN.shape[1], k_LPKHE.shape[4], G * W
    v_LPK = _as_stored(v_LPKEH, H)
    limit = max(1, min(GROUP_HEADS // K, GROUP_QUERIES // M))
    R = next(rows for rows in range(limit, 0, -1) if A % rows == 0)
    block_pages = max(1, min(BLOCK_ENTRIES // E, N))
    scalars = (jnp.stack([layer, used]), page_table_AN.reshape(-1), length_A)

    def rows(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((R, *shape), lambda group, *_: (group, *[0] * len(shape)))

    def rows_of_layer(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, R, *shape), lambda group, at, *_: (at[0], group, *[0] * len(shape)))

    if new is None:
        new_specs, results, dtype = None, [(M, 1), (M, 1), (M, H)], jnp.float32
    else:
        own, buffer = rows(K, 1, H), rows_of_layer(K, new.k_RKJH.shape[3], H)
        new_specs = NewTokens(rows(1, H // 2), rows(1, H // 2), own, own, buffer, buffer)
        results, dtype = [(M, H), (1, H), (1, H)], q_AKGWH.dtype
    (out,) = pl.pallas_call(
        partial(_attention_kernel, N=N, block_pages=block_pages),
        out_shape=([jax.ShapeDtypeStruct((A, K, *shape), dtype) for shape in results],),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(A // R,),
            in_specs=[rows(K, M, H), HBM, HBM, new_specs],
            out_specs=([rows(K, *shape) for shape in results],),
            scratch_shapes=[
                pltpu.VMEM((2, R, block_pages, *k_LPKHE.shape[2:]), k_LPKHE.dtype),
                pltpu.VMEM((2, R, block_pages, *v_LPK.shape[2:]), v_LPK.dtype),
                *[pltpu.VMEM((R, K, M, size), jnp.float32) for size in (1, 1, H)],
                pltpu.VMEM((R, K, M, H), q_AKGWH.dtype),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="paged_attention" if new is None else "decode_attention",
    )(*scalars, q_AKGWH.reshape(A, K, M, H), k_LPKHE, v_LPK, new)
    return out


def _attention_kernel(
    at_2: Any,  # the layer, and the entries of the decode buffer
    page_table: Any,  # the rows of page_table_AN, one after the other
    length_A: Any,
    q_RKMH: Any,
    k_LPKHE: Any,
    v_LPK: Any,  # [E, H] or [H, E], see `_as_stored`
    new: NewTokens | None,
    results: Sequence[Any],
    k_buffers: Any,  # of two blocks of pages: one is copied while the other is read
    v_buffers: Any,
    max_RKM1: Any,
    sum_RKM1: Any,
    acc_RKMH: Any,
    rotated_RKMH: Any,
    buffer_1: Any,
    copied_2: Any,
    *,
    N: int,
    block_pages: int,
):
    R, _, _, H = q_RKMH.shape
    E = k_LPKHE.shape[4]
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
                source = at_2[0], page_table[chunk * N + number]
                for pool, buffers in ((k_LPKHE, k_buffers), (v_LPK, v_buffers)):
                    act(pltpu.make_async_copy(pool.at[source], buffers.at[buffer, r, page], copied_2.at[buffer]))

        def of_chunk(r: Any, _: None) -> None:
            for page in range(block_pages):
                of_page(r, page)

        jax.lax.fori_loop(0, R, of_chunk, None)

    def start(group: Any, block: Any, buffer: Any) -> None:
        copies(group, block, buffer, lambda copy: copy.start())

    def attend(r: int, score_KMC: Array, mask_C: Array, values: Sequence[Array], v_axes: str = "KCH") -> None:
        """Adds keys, whose values are in blocks of equal size, to the softmax."""
        score_KMC = jnp.where(mask_C, score_KMC * H**-0.5, NEG_INF)
        old_KM1 = max_RKM1[r]
        max_KM1 = jnp.maximum(old_KM1, jnp.max(score_KMC, axis=-1, keepdims=True))
        weight_KMC, scale_KM1 = jnp.exp(score_KMC - max_KM1), jnp.exp(old_KM1 - max_KM1)
        acc_KMH, size = scale_KM1 * acc_RKMH[r], score_KMC.shape[2] // len(values)
        for i, value in enumerate(values):
            part_KMC = weight_KMC[..., i * size : (i + 1) * size].astype(value.dtype)
            acc_KMH += einsum_f32(f"KMC,{v_axes}->KMH", part_KMC, value)
        max_RKM1[r] = max_KM1
        sum_RKM1[r] = scale_KM1 * sum_RKM1[r] + jnp.sum(weight_KMC, axis=-1, keepdims=True)
        acc_RKMH[r] = acc_KMH

    @pl.when(group == 0)
    def _():
        buffer_1[0] = 0
        # Entries that were never copied are masked, but multiplied by 0.
        v_buffers[...] = jnp.zeros_like(v_buffers)
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
            scores_KME = [einsum_f32("KMH,KHE->KME", q_RKMH[r], k_buffers[buffer, r, i]) for i in range(block_pages)]
            values, v_axes = [v_buffers[buffer, r, i] for i in range(block_pages)], "KCH" if H >= LANES else "KHC"
            attend(r, jnp.concatenate(scores_KME, axis=-1), entry_1C < length_A[group * R + r], values, v_axes)
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
    k_LPKHE: Array,
    v_LPKEH: Array,
    k_LAKWH: Array,
    v_LAKWH: Array,
    page_table_AN: Array,
    start_A: Array,
    added_A: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """The pools, updated in place: the first `added_A` tokens of each chunk become entries start, start + 1, ...

    Tokens past the last page are dropped. Chunks are appended one after the other, so that several may share a page.
    Values must be finite, and so must the keys of a token, unless all are NaN.
    """
    L, A, K, W, H = k_LAKWH.shape
    pools = k_LPKHE, _as_stored(v_LPKEH, H)
    chunk = pl.BlockSpec((L, None, K, W, H), lambda chunk, *_: (0, chunk, 0, 0, 0))
    scalars = (page_table_AN.reshape(-1), start_A, added_A)
    k_LPKHE, v_LPK = pl.pallas_call(
        partial(_append_kernel, N=page_table_AN.shape[1]),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(A,),
            in_specs=[chunk, chunk, HBM, HBM],
            out_specs=[HBM, HBM],
            scratch_shapes=[
                *[pltpu.VMEM((L, *pool.shape[2:]), pool.dtype) for pool in pools],
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        input_output_aliases={len(scalars) + 2: 0, len(scalars) + 3: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="append_to_pages",
    )(*scalars, k_LAKWH, v_LAKWH, *pools)
    return k_LPKHE, _as_stored(v_LPK, H)


def _append_kernel(
    page_table: Any,  # the rows of page_table_AN, one after the other
    start_A: Any,
    added_A: Any,
    k_LKWH: Any,
    v_LKWH: Any,
    _k: Any,
    _v: Any,
    k_LPKHE: Any,
    v_LPK: Any,  # [E, H] or [H, E], see `_as_stored`
    k_LKHE: Any,
    v_LK: Any,
    copied_2: Any,
    *,
    N: int,
):
    L, _, W, H = k_LKWH.shape
    E = k_LKHE.shape[3]
    chunk = pl.program_id(0)
    start, added = start_A[chunk], added_A[chunk]
    first = start // E

    def write_page(reached: Any, _: None) -> None:
        page, offset = page_table[chunk * N + first + reached], start - (first + reached) * E
        pages = ((k_LPKHE.at[:, page], k_LKHE), (v_LPK.at[:, page], v_LK))
        _copy_all([pltpu.make_async_copy(pool, x, copied_2.at[i]) for i, (pool, x) in enumerate(pages)])

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

        def write_layer(layer: Any, _: None) -> None:
            k_LKHE[layer] = last(k_LKWH[layer], k_LKHE[layer]).astype(k_LKHE.dtype)
            if H < LANES:
                v_LK[layer] = last(v_LKWH[layer], v_LK[layer]).astype(v_LK.dtype)
            else:
                placed_KEH = _place("KWH,EW->KEH", v_LKWH[layer], place(0, 1))
                v_LK[layer] = jnp.where(is_new((E, 1), 0), placed_KEH, v_LK[layer]).astype(v_LK.dtype)

        jax.lax.fori_loop(0, L, write_layer, None)
        _copy_all([pltpu.make_async_copy(x, pool, copied_2.at[i]) for i, (pool, x) in enumerate(pages)])

    reach = jnp.where(added > 0, (start + added - 1) // E - first + 1, 0)
    jax.lax.fori_loop(0, jnp.minimum(reach, N - first), write_page, None)


def _place(subscripts: str, new_KWH: Array, place: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if new_KWH.dtype == jnp.float32 else None
    return einsum_f32(subscripts, new_KWH, place.astype(new_KWH.dtype), precision=precision)


def _copy_all(copies: Sequence[Any]) -> None:
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()


def _as_stored(v_LPK: Array, head_size: int) -> Array:
    """The values with the last dimensions as the compiler stores them, [E, H] or [H, E]; and back."""
    return v_LPK if head_size >= LANES else jnp.swapaxes(v_LPK, 3, 4)
