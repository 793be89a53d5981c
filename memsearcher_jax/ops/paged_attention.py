"""Attention over the page pool of the KV cache as Pallas kernels for TPUs. Arrays are those of one device.

A page table names the pages of each context, in order. The pools hold all layers and stay in HBM; a kernel copies the
pages that it needs to VMEM, the next ones while it computes. Pages past a context's length are never read.

Pools are k_LPKHE and v_LPKEH, and in int8 also scale_LPK2E. Scores are multiplied by the scales of keys, and their
weights by those of values, so that no page is converted to another scale. `append_to_pages` fills the pages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memsearcher_jax.ops.attention import NEG_INF, OnlineSoftmax, einsum_f32
from memsearcher_jax.ops.quantization import rounded
from memsearcher_jax.ops.vmem import vmem_bytes

GROUP_HEADS = 8
"""Chunks are computed in groups with up to this many (chunk, kv head) pairs, so that one waits less for another."""

GROUP_QUERIES = 64
"""Queries of a kv head that a group may have together; at least those of one chunk."""

BLOCK_ENTRIES = 512
"""Entries of each context that are copied together."""

QUERY_BYTES = 16 << 10
"""Memory of a core for one query of a kv head, with its scores of a block; compiled programs need 9 to 10 KB."""

LANES = 128
"""If the last dimension of an array is smaller, the compiler stores another dimension last, to avoid padding."""

HBM = pl.BlockSpec(memory_space=pltpu.HBM)


class CachedEntries(NamedTuple):
    """The entries of the pools that A chunks read: in one layer, the first `length_A` of each chunk's context."""

    layer: Array
    page_table_AI: Array
    length_A: Array


class NewTokens(NamedTuple):
    """What no page holds yet: the token of each chunk, its rotation, and the decode buffer.

    In the kernel the arrays are those of a group, with its `a` of the A chunks, and without L.
    """

    cos_A1h: Any
    sin_A1h: Any
    k_AK1H: Any
    v_AK1H: Any
    k_LAKJH: Any
    v_LAKJH: Any


def paged_attention(
    q_AKQWH: Array, pools: Sequence[Array], layer: Array, page_table_AI: Array, length_A: Array
) -> OnlineSoftmax:
    """Attention of A chunks of W queries over the first `length_A` entries of their contexts, in one layer.

    Values must be finite everywhere. The softmax of a chunk with length 0 has the maximum NEG_INF, so that
    `attention.combine` ignores it. A chunk whose queries exceed the memory of a core is cut into several, each of which
    reads the pages.
    """
    parts = _parts_of_chunk(q_AKQWH)
    cut_AKQWH = _cut(q_AKQWH, parts)
    entries = CachedEntries(layer, jnp.repeat(page_table_AI, parts, axis=0), jnp.repeat(length_A, parts))
    max_AKX1, sum_AKX1, acc_AKXH = _attention(cut_AKQWH, pools, entries, jnp.int32(0), None)
    shape = cut_AKQWH.shape
    max_AKQW = max_AKX1.reshape(shape[:4])
    sum_AKQW = sum_AKX1.reshape(shape[:4])
    return OnlineSoftmax(*(_joined(x, parts) for x in (max_AKQW, sum_AKQW, acc_AKXH.reshape(shape))))


def _parts_of_chunk(q_AKQWH: Array) -> int:
    """The fewest equal parts of a chunk's tokens of which each fits the memory of a core."""
    _, K, Q, W, _ = q_AKQWH.shape
    most_queries = vmem_bytes() // QUERY_BYTES
    return next((parts for parts in range(1, W) if W % parts == 0 and K * Q * W // parts <= most_queries), W)


def _cut(q_AKQWH: Array, parts: int) -> Array:
    """As many times more and shorter chunks, those of one chunk in order."""
    A, K, Q, W, H = q_AKQWH.shape
    parts_first = jnp.moveaxis(q_AKQWH.reshape(A, K, Q, parts, W // parts, H), 3, 1)
    return parts_first.reshape(A * parts, K, Q, W // parts, H)


def _joined(x_AKQW: Array, parts: int) -> Array:
    """The inverse of `_cut`, for arrays with or without a last dimension H."""
    A, K, Q, W, *rest = x_AKQW.shape
    parts_inside = jnp.moveaxis(x_AKQW.reshape(A // parts, parts, K, Q, W, *rest), 1, 3)
    return parts_inside.reshape(A // parts, K, Q, parts * W, *rest)


def decode_attention(
    q_AKQ1H: Array, new: NewTokens, used: Array, pools: Sequence[Array], entries: CachedEntries
) -> tuple[Array, Array, Array]:
    """(out_AKQ1H, k_AK1H, v_AK1H): as `paged_attention`, also over the decode buffer and the chunk's own token.

    Of the decode buffer the first `used` entries are read. Queries and keys are rotated first, and values masked; the
    keys and values returned are those of the own token, as `kv_cache.mask_nonfinite_values`, `rope.apply_rope` and, in
    int8, `quantization.rounded` make them.
    """
    out_AKXH, k_AK1H, v_AK1H = _attention(q_AKQ1H, pools, entries, used, new)
    return out_AKXH.reshape(q_AKQ1H.shape), k_AK1H, v_AK1H


@dataclass(frozen=True)
class _Sizes:
    """The sizes of a call that the shapes of the kernel's arguments do not show."""

    context_pages: int  # columns of the page table
    group_chunks: int  # a
    block_pages: int  # pages of each context that are copied together


class _Scratch(NamedTuple):
    """Memory that the kernel keeps from one group to the next."""

    pages: Sequence[Any]  # for each pool, two buffers with a block of pages of each chunk of a group
    max_aKX1: Any
    sum_aKX1: Any
    acc_aKXH: Any
    rotated_aKXH: Any  # queries with rotary positions
    buffer_1: Any  # the buffer that is read next, 0 or 1
    copied_2: Any  # for each buffer, a semaphore that counts what was copied to it


def _attention(
    q_AKQWH: Array,
    pools: Sequence[Array],
    entries: CachedEntries,
    used: Array,
    new: NewTokens | None,
) -> list[Array]:
    """The softmax of each chunk's X = Q * W queries; with `new` what `decode_attention` returns."""
    A, K, Q, W, H = q_AKQWH.shape
    X = Q * W
    page_table_AI = entries.page_table_AI
    pools = [pools[0], as_stored(pools[1], H), *pools[2:]]
    scalars = (jnp.stack([entries.layer, used]), page_table_AI.reshape(-1), entries.length_A)
    page_tokens = pools[0].shape[4]
    context_pages = page_table_AI.shape[1]
    max_chunks = max(1, min(GROUP_HEADS // K, GROUP_QUERIES // X))
    group_chunks = max(chunks for chunks in range(1, max_chunks + 1) if A % chunks == 0)
    sizes = _Sizes(context_pages, group_chunks, block_pages=max(1, min(BLOCK_ENTRIES // page_tokens, context_pages)))

    def rows(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((group_chunks, *shape), lambda group, *_: (group, *[0] * len(shape)))

    def rows_of_layer(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, group_chunks, *shape), lambda group, at, *_: (at[0], group, *[0] * len(shape)))

    if new is None:
        new_specs = None
        result_shapes = [(X, 1), (X, 1), (X, H)]
        dtype = jnp.float32
    else:
        angles = rows(1, H // 2)
        own = rows(K, 1, H)
        buffer = rows_of_layer(K, new.k_LAKJH.shape[3], H)
        new_specs = NewTokens(angles, angles, own, own, buffer, buffer)
        result_shapes = [(X, H), (1, H), (1, H)]
        dtype = q_AKQWH.dtype
    scratch = _Scratch(
        pages=[pltpu.VMEM((2, group_chunks, sizes.block_pages, *pool.shape[2:]), pool.dtype) for pool in pools],
        max_aKX1=pltpu.VMEM((group_chunks, K, X, 1), jnp.float32),
        sum_aKX1=pltpu.VMEM((group_chunks, K, X, 1), jnp.float32),
        acc_aKXH=pltpu.VMEM((group_chunks, K, X, H), jnp.float32),
        rotated_aKXH=pltpu.VMEM((group_chunks, K, X, H), q_AKQWH.dtype),
        buffer_1=pltpu.SMEM((1,), jnp.int32),
        copied_2=pltpu.SemaphoreType.DMA((2,)),
    )
    (results,) = pl.pallas_call(
        partial(_attention_kernel, sizes=sizes),
        out_shape=([jax.ShapeDtypeStruct((A, K, *shape), dtype) for shape in result_shapes],),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(A // group_chunks,),
            in_specs=[rows(K, X, H), [HBM for _ in pools], new_specs],
            out_specs=([rows(K, *shape) for shape in result_shapes],),
            scratch_shapes=[scratch],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_bytes()),
        name="paged_attention" if new is None else "decode_attention",
    )(*scalars, q_AKQWH.reshape(A, K, X, H), pools, new)
    return results


def _attention_kernel(
    layer_and_used_2: Any,  # the layer, and the used entries of the decode buffer
    page_table: Any,  # the rows of page_table_AI, one after the other
    length_A: Any,
    q_aKXH: Any,
    pools: Sequence[Any],  # values [E, H] or [H, E], see `as_stored`
    new: NewTokens | None,
    results: Sequence[Any],
    scratch: _Scratch,
    *,
    sizes: _Sizes,
):
    """Attention of one group of chunks.

    The pages of a group come in blocks. While one block is computed, the next one is copied to the other buffer; it may
    be that of a later group, and groups without pages are passed over. Blocks b0 and b1 of group g0, none of g1, and b0
    of g2:

        time ->              |       |    grid step 0    | 1 | step 2 |
        copied to buffer 0   | g0 b0 |         |  g2 b0  |   |        |
        copied to buffer 1   |       |  g0 b1  |         |   |        |
        computed             |       |  g0 b0  |  g0 b1  |   | g2 b0  |
        read from buffer     |       |    0    |    1    |   |   0    |
    """
    group_chunks = sizes.group_chunks
    head_size = q_aKXH.shape[3]
    is_int8 = len(pools) == 3
    group = pl.program_id(0)
    groups = pl.num_programs(0)
    copies = _PageCopies(layer_and_used_2, page_table, length_A, groups, pools, scratch, sizes)
    softmax = _RunningSoftmax(scratch.max_aKX1, scratch.sum_aKX1, scratch.acc_aKXH)

    @pl.when(group == 0)
    def _():
        scratch.buffer_1[0] = 0
        # Entries that were never copied are masked, but multiplied by 0: their values, or the scales of these.
        scratch.pages[-1][...] = jnp.zeros_like(scratch.pages[-1])
        first = copies.first_group_with_pages(0)
        pl.when(first < groups)(lambda: copies.start(first, 0, 0))

    softmax.clear()
    if new is not None:
        _attend_to_new_tokens(q_aKXH, new, layer_and_used_2, results, scratch.rotated_aKXH, softmax, is_int8=is_int8)
        q_aKXH = scratch.rotated_aKXH

    blocks = copies.blocks_of(group)
    following = copies.first_group_with_pages(group + 1)
    block_entries = sizes.block_pages * copies.page_tokens

    def attend_to_block(block: Any, _: None) -> None:
        buffer = scratch.buffer_1[0]
        is_last = block == blocks - 1
        next_group = jnp.where(is_last, following, group)
        pl.when(next_group < groups)(lambda: copies.start(next_group, jnp.where(is_last, 0, block + 1), 1 - buffer))
        copies.wait(group, block, buffer)
        first_entry = block * sizes.block_pages * copies.page_tokens
        entry_1Y = first_entry + jax.lax.broadcasted_iota(jnp.int32, (1, block_entries), 1)
        for r in range(group_chunks):
            pages = [[copied[buffer, r, i] for i in range(sizes.block_pages)] for copied in scratch.pages]
            keys, values = pages[:2]
            if is_int8:
                keys = [k_KHE.astype(q_aKXH.dtype) for k_KHE in keys]
                values = [v_K.astype(q_aKXH.dtype) for v_K in values]
            scores_KXE = [einsum_f32("KXH,KHE->KXE", q_aKXH[r], k_KHE) for k_KHE in keys]
            value_scales = []
            if is_int8:
                scales_K2E = pages[2]
                scores_KXE = [
                    score_KXE * scale_K2E[:, :1] for score_KXE, scale_K2E in zip(scores_KXE, scales_K2E, strict=True)
                ]
                value_scales = [scale_K2E[:, 1:] for scale_K2E in scales_K2E]
            is_cached_1Y = entry_1Y < length_A[group * group_chunks + r]
            score_KXY = jnp.concatenate(scores_KXE, axis=-1)
            value_axes = "KYH" if head_size >= LANES else "KHY"
            softmax.add(r, score_KXY, is_cached_1Y, values, value_axes, value_scales)
        scratch.buffer_1[0] = 1 - buffer

    jax.lax.fori_loop(0, blocks, attend_to_block, None)
    if new is not None:
        out_aKXH = results[0]
        out_aKXH[...] = (scratch.acc_aKXH[...] / scratch.sum_aKX1[...]).astype(out_aKXH.dtype)
    else:
        for result, value in zip(results, (scratch.max_aKX1, scratch.sum_aKX1, scratch.acc_aKXH), strict=True):
            result[...] = value[...]


@dataclass(frozen=True)
class _PageCopies:
    """Copies of blocks of pages from the pools to the buffers of the scratch memory."""

    layer_and_used_2: Any
    page_table: Any
    length_A: Any
    groups: Any
    pools: Sequence[Any]
    scratch: _Scratch
    sizes: _Sizes

    @property
    def page_tokens(self) -> int:
        return self.pools[0].shape[4]

    def blocks_of(self, group: Any) -> Any:
        """Blocks of pages of the group's longest chunk."""
        group_chunks = self.sizes.group_chunks
        longest = functools.reduce(jnp.maximum, [self.length_A[group * group_chunks + r] for r in range(group_chunks)])
        return pl.cdiv(longest, self.sizes.block_pages * self.page_tokens)

    def first_group_with_pages(self, group: Any) -> Any:
        """The first group from `group` on that reads pages, or `groups`."""

        def is_empty(group: Any) -> Any:
            return (group < self.groups) & (self.blocks_of(jnp.minimum(group, self.groups - 1)) == 0)

        return jax.lax.while_loop(is_empty, lambda group: group + 1, group)

    def start(self, group: Any, block: Any, buffer: Any) -> None:
        self._for_each(group, block, buffer, lambda copy: copy.start())

    def wait(self, group: Any, block: Any, buffer: Any) -> None:
        self._for_each(group, block, buffer, lambda copy: copy.wait())

    def _for_each(self, group: Any, block: Any, buffer: Any, act: Callable[[Any], None]) -> None:
        """`act` on the copy of every page of the block that a chunk of the group reads."""
        group_chunks = self.sizes.group_chunks
        buffers = self.scratch.pages
        semaphores = self.scratch.copied_2

        def of_page(r: Any, page: int) -> None:
            chunk = group * group_chunks + r
            number = block * self.sizes.block_pages + page

            @pl.when(number * self.page_tokens < self.length_A[chunk])
            def _():
                source = self.layer_and_used_2[0], self.page_table[chunk * self.sizes.context_pages + number]
                for pool, copied in zip(self.pools, buffers, strict=True):
                    act(pltpu.make_async_copy(pool.at[source], copied.at[buffer, r, page], semaphores.at[buffer]))

        def of_chunk(r: Any, _: None) -> None:
            for page in range(self.sizes.block_pages):
                of_page(r, page)

        jax.lax.fori_loop(0, group_chunks, of_chunk, None)


@dataclass(frozen=True)
class _RunningSoftmax:
    """The softmax of each chunk of a group over the keys added so far."""

    max_aKX1: Any
    sum_aKX1: Any
    acc_aKXH: Any

    def clear(self) -> None:
        self.max_aKX1[...] = jnp.full_like(self.max_aKX1, NEG_INF)
        self.sum_aKX1[...] = jnp.zeros_like(self.sum_aKX1)
        self.acc_aKXH[...] = jnp.zeros_like(self.acc_aKXH)

    def add(
        self,
        r: int,
        score_KXY: Array,
        mask_Y: Array,
        values: Sequence[Array],
        value_axes: str = "KYH",
        value_scales: Sequence[Array] = (),
    ) -> None:
        """Adds Y keys, whose values are in blocks of equal size, to the softmax of chunk r."""
        score_KXY = jnp.where(mask_Y, score_KXY * self.acc_aKXH.shape[3] ** -0.5, NEG_INF)
        old_KX1 = self.max_aKX1[r]
        max_KX1 = jnp.maximum(old_KX1, jnp.max(score_KXY, axis=-1, keepdims=True))
        weight_KXY = jnp.exp(score_KXY - max_KX1)
        scale_KX1 = jnp.exp(old_KX1 - max_KX1)
        acc_KXH = scale_KX1 * self.acc_aKXH[r]
        size = score_KXY.shape[2] // len(values)
        for i, value in enumerate(values):
            part_KXY = weight_KXY[..., i * size : (i + 1) * size]
            if value_scales:
                part_KXY = part_KXY * value_scales[i]
            acc_KXH += einsum_f32(f"KXY,{value_axes}->KXH", part_KXY.astype(value.dtype), value)
        self.max_aKX1[r] = max_KX1
        self.sum_aKX1[r] = scale_KX1 * self.sum_aKX1[r] + jnp.sum(weight_KXY, axis=-1, keepdims=True)
        self.acc_aKXH[r] = acc_KXH


def _attend_to_new_tokens(
    q_aKXH: Any,
    new: NewTokens,
    layer_and_used_2: Any,
    results: Sequence[Any],
    rotated_aKXH: Any,
    softmax: _RunningSoftmax,
    *,
    is_int8: bool,
) -> None:
    """Rotates queries and the own token, writes the token's key and value to the results, and attends to `new`."""
    _, k_aK1H, v_aK1H = results
    J = new.k_LAKJH.shape[2]
    is_used_1J = jax.lax.broadcasted_iota(jnp.int32, (1, J), 1) < layer_and_used_2[1]
    for r in range(q_aKXH.shape[0]):
        cos_1H = jnp.concatenate([new.cos_A1h[r]] * 2, axis=-1)
        sin_1H = jnp.concatenate([-new.sin_A1h[r], new.sin_A1h[r]], axis=-1)
        value_K1H = new.v_AK1H[r]
        is_finite_K1H = jnp.abs(value_K1H.astype(jnp.float32)) < jnp.inf
        is_finite_K11 = jnp.min(is_finite_K1H.astype(jnp.float32), axis=-1, keepdims=True) > 0
        key_K1H = jnp.where(is_finite_K11, _rotate(new.k_AK1H[r], cos_1H, sin_1H), jnp.nan).astype(k_aK1H.dtype)
        value_K1H = jnp.where(is_finite_K11, value_K1H.astype(jnp.float32), 0.0).astype(value_K1H.dtype)
        if is_int8:
            key_K1H = rounded(key_K1H)
            value_K1H = rounded(value_K1H)
        k_aK1H[r] = key_K1H
        v_aK1H[r] = value_K1H
        rotated_aKXH[r] = _rotate(q_aKXH[r], cos_1H, sin_1H).astype(rotated_aKXH.dtype)
        own_score_KX1 = einsum_f32("KXH,KWH->KXW", rotated_aKXH[r], key_K1H)
        softmax.add(r, own_score_KX1, jnp.full((1, 1), True), [value_K1H])
        score_KXJ = einsum_f32("KXH,KJH->KXJ", rotated_aKXH[r], new.k_LAKJH[r])
        softmax.add(r, score_KXJ, is_used_1J, [new.v_LAKJH[r]])


def _rotate(x_KXH: Array, cos_XH: Array, sin_XH: Array) -> Array:
    low_KXh, high_KXh = jnp.split(x_KXH.astype(jnp.float32), 2, axis=-1)
    swapped_KXH = jnp.concatenate([high_KXh, low_KXh], axis=-1)
    return x_KXH.astype(jnp.float32) * cos_XH + swapped_KXH * sin_XH


def as_stored(v_LPK: Array, head_size: int) -> Array:
    """The values with the last dimensions as the compiler stores them, [E, H] or [H, E]; and back."""
    return v_LPK if head_size >= LANES else jnp.swapaxes(v_LPK, 3, 4)
