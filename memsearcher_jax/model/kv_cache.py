"""The paged KV cache: an argument and a result of `qwen.forward`, never hidden state.

The cache is a pool of P pages with E entries each: keys [L, P, K, H, E], values [L, P, K, E, H], so that a page is one
contiguous block for all heads. A context is a list of pages, which the host keeps; its entries fill them in order.
Contexts with a common beginning name the same pages. A forward pass computes A chunks of consecutive tokens, of which
several may belong to one context, and `page_table_AI` names the pages of each chunk's context.

On a mesh each data-parallel shard has an equal share of the pages and an equal share of the chunks, in order, and page
numbers count from the shard's first page. Entries of the table past a context's end may hold any valid number.

In int8 a third pool has the scales of each entry and head, [L, P, K, 2, E]: that of the key, then that of the value. A
new token is rounded before anything attends to it, so it makes no difference whether it is in a page yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from memsearcher_jax.model.config import Attention, ModelConfig
from memsearcher_jax.model.rope import apply_rope
from memsearcher_jax.ops import append_to_pages as append_kernel
from memsearcher_jax.ops import paged_attention as attention_kernels
from memsearcher_jax.ops.attention import (
    OnlineSoftmax,
    combine,
    empty,
    group_heads,
    normalize,
    partial_attention,
    self_attention,
)
from memsearcher_jax.ops.axes import as_bits, constrain, from_bits, platform, shard_map_per_device
from memsearcher_jax.ops.paged_attention import CachedEntries, NewTokens
from memsearcher_jax.ops.quantization import quantize, rounded
from memsearcher_jax.ops.splash_attention import splash_softmax

CACHE_AXES = ("layers", "batch", "kv", None, None)
"""Logical axes of all pools, of both arrays of a `DecodeBuffer`, and of the new keys and values of a forward pass."""

Rotation = tuple[Array, Array]
"""(cos_BTh, sin_BTh) of `rope.rope_rotation`."""

KVSource = Callable[[Array], OnlineSoftmax]
"""q_BKQTH -> attention over keys and values held elsewhere, such as in a cache; a query may see none of them."""


class PageKernels(NamedTuple):
    """What reads and fills the pages, as the functions of this file do on platforms without kernels."""

    paged_attention: Callable[..., OnlineSoftmax]
    append_to_pages: Callable[..., tuple[Array, ...]]


PAGE_KERNELS = {"tpu": PageKernels(attention_kernels.paged_attention, append_kernel.append_to_pages)}


class SegmentKernel(NamedTuple):
    """Attention within segments, for rows of a multiple of `row_multiple` tokens."""

    attention: Callable[[Array, Array, Array, Array], OnlineSoftmax]
    row_multiple: int


SEGMENT_KERNELS = {"tpu": SegmentKernel(splash_softmax, row_multiple=128)}
"""Platform -> its attention within segments; the others have `self_attention`."""

CHUNK_AXES, TABLE_AXES = ("batch",), ("batch", None)
"""Logical axes of what there is one of per chunk, and of a page table."""

ENTRY_AXES = (4, 3, 4)
"""Which dimension of the pools of keys, values and scales counts a page's entries."""

MAX_ROWS_TOGETHER = 8
"""Chunks whose pages are read together, up to the length of the longest; chunks are sorted by length first."""

CPU_CACHE_BYTES = 1 << 17
"""Bytes of keys that are read together, so that they stay in a core's cache with the values and scores."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """P pages of E entries."""

    k_LPKHE: Array  # `as_bits` of compute_dtype, or int8, with rotary positions applied
    v_LPKEH: Array  # the same; always finite: masked values are multiplied by 0
    scale_LPK2E: Array | None = None  # float32: of int8

    @classmethod
    def empty(cls, config: ModelConfig, pages: int, page_tokens: int, *, int8: bool = False) -> Cache:
        """Call it under jit to create it spread over a mesh."""
        H = config.head_size
        E = page_tokens

        def pool(rows: int, columns: int, dtype: str) -> Array:
            zeros = jnp.zeros((config.layers, pages, config.kv_heads, rows, columns), dtype)
            return constrain(as_bits(zeros), CACHE_AXES)

        dtype = "int8" if int8 else config.compute_dtype
        return cls(
            k_LPKHE=pool(H, E, dtype),
            v_LPKEH=pool(E, H, dtype),
            scale_LPK2E=pool(2, E, "float32") if int8 else None,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CacheView:
    """A cache, and the contexts that the A chunks of a forward pass read and extend. Made by `of`."""

    cache: Cache
    page_table_AI: Array  # int32: as the module describes
    start_A: Array  # int32: entry of a chunk's first token
    length_A: Array  # int32: entries that each chunk reads
    order_A: Array  # int32: the chunks sorted by length, longest first; counted within a device's share
    rank_A: Array  # int32: the inverse of order_A
    shared_A: Array  # int32: first pages that all chunks of a device have in common; one value for each of its chunks
    attention: Attention = field(default="auto", metadata={"static": True})

    @classmethod
    def of(
        cls,
        cache: Cache,
        page_table_AI: Array,
        start_A: Array,
        length_A: Array,
        attention: Attention = "auto",
    ) -> CacheView:
        """Each chunk reads the first `length_A` entries of its context, and writes its own tokens from `start_A` on.

        Chunks of one context are adjacent, each full except the last; each reads what was cached before the first.
        `attention`: "xla" computes everything without Pallas kernels.
        """
        argsort = shard_map_per_device(lambda x_A: jnp.argsort(x_A).astype(jnp.int32), (CHUNK_AXES,), CHUNK_AXES)
        page_tokens = cache.v_LPKEH.shape[3]
        count_common = shard_map_per_device(partial(common_pages, page_tokens), (CHUNK_AXES, TABLE_AXES), CHUNK_AXES)
        order_A = argsort(-length_A)
        shared_A = count_common(length_A, page_table_AI)
        rank_A = argsort(order_A)
        return cls(cache, page_table_AI, start_A, length_A, order_A, rank_A, shared_A, attention)

    @property
    def platform(self) -> str:
        """The platform whose kernels are used; "xla" if none are."""
        return "xla" if self.attention == "xla" else platform()

    def attend(
        self,
        layer: Array,
        rotation: Rotation,
        q_BNTH: Array,
        k_BKTH: Array,
        v_BKTH: Array,
        segment_BT: Array,
        *sources: KVSource,
    ) -> tuple[Array, Array, Array]:
        """(out_BNTH, k_BKTH, v_BKTH) of the attention of one layer.

        New tokens attend to the cached entries, to all that `sources` hold, and causally to the new tokens of the same
        segment. Query head n reads kv head n // (N / K). Padding (segment 0) attends to padding, so that no softmax is
        empty. The result has the keys and values of the new tokens, as they are to be appended: `as_bits`.
        """
        q_BNTH = apply_rope(q_BNTH, rotation)
        k_BKTH = apply_rope(k_BKTH, rotation)
        k_BKTH, v_BKTH = mask_nonfinite_values(k_BKTH, v_BKTH)
        if self.cache.scale_LPK2E is not None:
            k_BKTH = rounded(k_BKTH)
            v_BKTH = rounded(v_BKTH)
        q_BKQTH = group_heads(q_BNTH, k_BKTH)
        kernel = SEGMENT_KERNELS.get(self.platform)
        if kernel is not None and segment_BT.shape[1] % kernel.row_multiple == 0:
            own = kernel.attention(q_BNTH, k_BKTH, v_BKTH, segment_BT)
        else:
            own = self_attention(q_BKQTH, k_BKTH, v_BKTH, segment_BT)
        cached = self.attend_cached(layer, q_BKQTH)
        others = [source(q_BKQTH) for source in sources]
        softmax = combine([own, cached, *others])
        out_BNTH = normalize(softmax).reshape(q_BNTH.shape).astype(q_BNTH.dtype)
        return out_BNTH, as_bits(k_BKTH), as_bits(v_BKTH)

    def append(self, k_LBKTH: Array, v_LBKTH: Array, segment_BT: Array) -> Cache:
        """The cache with each chunk's real tokens (segment above 0, before any padding) written at its start."""
        chunks = self.start_A.shape[0]
        added_A = jnp.sum(segment_BT.reshape(chunks, -1) > 0, axis=1, dtype=jnp.int32)
        new = (k_LBKTH, v_LBKTH)
        if self.cache.scale_LPK2E is not None:
            keys, key_scale_LBKT = quantize(from_bits(k_LBKTH), [4])
            values, value_scale_LBKT = quantize(from_bits(v_LBKTH), [4])
            new = (keys, values, jnp.stack([key_scale_LBKT, value_scale_LBKT], axis=4))

        def write(
            pools: tuple[Array, ...], new: tuple[Array, ...], table_AI: Array, start_A: Array, added_A: Array
        ) -> tuple[Array, ...]:
            chunked = tuple(_chunks(x, 1, 3, len(table_AI)) for x in new)
            kernels = PAGE_KERNELS.get(self.platform)
            append = kernels.append_to_pages if kernels else append_to_pages
            return append(pools, chunked, table_AI, start_A, added_A)

        pools = tuple(jax.tree.leaves(self.cache))
        axes = (CACHE_AXES,) * len(pools)
        write = shard_map_per_device(write, (axes, axes, TABLE_AXES, CHUNK_AXES, CHUNK_AXES), axes)
        pools = write(pools, new, self.page_table_AI, self.start_A, added_A)
        return Cache(*(constrain(pool, CACHE_AXES) for pool in pools))

    def attend_cached(self, layer: Array, q_BKQTH: Array) -> OnlineSoftmax:
        """Attention to the cached entries of one layer."""
        query_axes = ("batch", "kv", None, None, None)
        scalar_axes = query_axes[:-1]
        scalar_shape = q_BKQTH.shape[:-1]

        def attend(q_BKQTH: Array, layer: Array, table_AI: Array, chunks: _Chunks, pools: Any) -> OnlineSoftmax:
            rows = len(q_BKQTH)
            q_AKQWH = _chunks(q_BKQTH, 0, 3, len(table_AI))
            if kernels := PAGE_KERNELS.get(self.platform):
                softmax = kernels.paged_attention(q_AKQWH, pools, layer, table_AI, chunks.length_A)
                return OnlineSoftmax(*(_rows(x_AKQW, rows) for x_AKQW in softmax))
            order_A = chunks.order_A
            sorted_table_AI = table_AI[order_A]
            sorted_length_A = chunks.length_A[order_A]
            shared_pages = chunks.shared_A[0]
            softmax = paged_attention(q_AKQWH[order_A], pools, layer, sorted_table_AI, sorted_length_A, shared_pages)
            return OnlineSoftmax(*(_rows(x_AKQW[chunks.rank_A], rows) for x_AKQW in softmax))

        pools = tuple(jax.tree.leaves(self.cache))
        attention = shard_map_per_device(
            attend,
            (query_axes, (), TABLE_AXES, _Chunks(*[CHUNK_AXES] * 4), (CACHE_AXES,) * len(pools)),
            OnlineSoftmax(scalar_axes, scalar_axes, query_axes),  # pyright: ignore[reportArgumentType]  # axes
            OnlineSoftmax(scalar_shape, scalar_shape, q_BKQTH.shape),  # pyright: ignore[reportArgumentType]  # shapes
        )
        chunks = _Chunks(self.length_A, self.order_A, self.rank_A, self.shared_A)
        return attention(q_BKQTH, layer, self.page_table_AI, chunks, pools)


class _Chunks(NamedTuple):
    """The fields of a `CacheView` of which there is one value for each chunk."""

    length_A: Any
    order_A: Any
    rank_A: Any
    shared_A: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeBuffer:
    """New tokens of B rows that are not in the cache yet: J entries per row, of which all rows have used as many.

    So a step writes one slice, not one per row. A decode loop appends its tokens to the cache once, at its end.
    """

    k_LBKJH: Array  # `as_bits` of compute_dtype, with rotary positions applied
    v_LBKJH: Array  # the same
    used: Array  # int32

    @classmethod
    def empty(cls, config: ModelConfig, rows: int, entries: int) -> DecodeBuffer:
        """Room for `entries` entries of each of `rows` contexts."""
        shape_LBKJH = (config.layers, rows, config.kv_heads, entries, config.head_size)
        zeros_LBKJH = constrain(as_bits(jnp.zeros(shape_LBKJH, config.compute_dtype)), CACHE_AXES)
        return cls(zeros_LBKJH, zeros_LBKJH, jnp.int32(0))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeCache:
    """A read-only cache and the decode buffer that new tokens are appended to."""

    view: CacheView  # one chunk for each row of `buffer`, in the same order
    buffer: DecodeBuffer

    def attend(
        self, layer: Array, rotation: Rotation, q_BNTH: Array, k_BKTH: Array, v_BKTH: Array, segment_BT: Array
    ) -> tuple[Array, Array, Array]:
        """As `CacheView.attend`, and attention to the buffer."""
        if self.view.platform == "tpu":
            return self._attend_in_kernel(layer, rotation, q_BNTH, k_BKTH, v_BKTH)
        buffer = self.buffer
        k_BKJH = from_bits(buffer.k_LBKJH[layer])
        v_BKJH = from_bits(buffer.v_LBKJH[layer])
        k_BKHJ = jnp.swapaxes(k_BKJH, 2, 3)
        mask_B1J = jnp.broadcast_to(jnp.arange(k_BKHJ.shape[3]) < buffer.used, (len(k_BKHJ), 1, k_BKHJ.shape[3]))

        def attend_buffer(q_BKQTH: Array) -> OnlineSoftmax:
            return partial_attention(q_BKQTH, k_BKHJ, v_BKJH, mask_B1J)

        return self.view.attend(layer, rotation, q_BNTH, k_BKTH, v_BKTH, segment_BT, attend_buffer)

    def _attend_in_kernel(
        self, layer: Array, rotation: Rotation, q_BNTH: Array, k_BKTH: Array, v_BKTH: Array
    ) -> tuple[Array, Array, Array]:
        def attend(
            q_BNTH: Array, new: NewTokens, used: Array, pools: Any, entries: CachedEntries
        ) -> tuple[Array, Array, Array]:
            q_BKQTH = group_heads(q_BNTH, new.k_AK1H)
            out_BKQTH, k_BKTH, v_BKTH = attention_kernels.decode_attention(q_BKQTH, new, used, pools, entries)
            return out_BKQTH.reshape(q_BNTH.shape), k_BKTH, v_BKTH

        pools = tuple(jax.tree.leaves(self.view.cache))
        # One row is one chunk, so that B is A.
        new = NewTokens(*rotation, k_BKTH, v_BKTH, self.buffer.k_LBKJH, self.buffer.v_LBKJH)
        entries = CachedEntries(layer, self.view.page_table_AI, self.view.length_A)

        heads = ("batch", "heads", None, None)
        kv = ("batch", "kv", None, None)
        angles = ("batch", None, None)
        new_axes = NewTokens(angles, angles, kv, kv, CACHE_AXES, CACHE_AXES)
        entries_axes = CachedEntries((), TABLE_AXES, CHUNK_AXES)  # pyright: ignore[reportArgumentType]  # axes
        in_axes = (heads, new_axes, (), (CACHE_AXES,) * len(pools), entries_axes)
        out_shapes = (q_BNTH.shape, k_BKTH.shape, v_BKTH.shape)
        attention = shard_map_per_device(attend, in_axes, (heads, kv, kv), out_shapes)
        return attention(q_BNTH, new, self.buffer.used, pools, entries)

    def append(self, k_LBKTH: Array, v_LBKTH: Array, segment_BT: Array) -> DecodeBuffer:
        """The buffer with T more entries."""
        buffer = self.buffer
        at = (0, 0, 0, buffer.used, 0)
        return replace(
            buffer,
            k_LBKJH=constrain(jax.lax.dynamic_update_slice(buffer.k_LBKJH, k_LBKTH, at), CACHE_AXES),
            v_LBKJH=constrain(jax.lax.dynamic_update_slice(buffer.v_LBKJH, v_LBKTH, at), CACHE_AXES),
            used=buffer.used + segment_BT.shape[1],
        )


def mask_nonfinite_values(k_BKTH: Array, v_BKTH: Array) -> tuple[Array, Array]:
    """Keys and values where a value that is not finite becomes 0 and its key NaN.

    A query that attends to such a token still gets NaN. A query that does not multiplies the value by 0, and 0 * NaN
    would spread NaN to all contexts of a block, and later to the next context in the same page.
    """
    finite_BKT1 = jnp.isfinite(v_BKTH).all(axis=-1, keepdims=True)
    return jnp.where(finite_BKT1, k_BKTH, jnp.nan), jnp.where(finite_BKT1, v_BKTH, 0)


def copy_pages(cache: Cache, source_A: Array, target_A: Array) -> Cache:
    """The cache with the pages `source_A` copied over the pages `target_A`, in order; an equal pair changes nothing."""

    def copy(x_LP: Array, source_A: Array, target_A: Array) -> Array:
        def copy_page(i: Array, x_LP: Array) -> Array:
            page_L1 = jax.lax.dynamic_slice_in_dim(x_LP, source_A[i], 1, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(x_LP, page_L1, target_A[i], axis=1)

        return jax.lax.fori_loop(0, source_A.shape[0], copy_page, x_LP)

    copy = shard_map_per_device(copy, (CACHE_AXES, CHUNK_AXES, CHUNK_AXES), CACHE_AXES)
    return jax.tree.map(lambda x_LP: constrain(copy(x_LP, source_A, target_A), CACHE_AXES), cache)


# The functions below run on the arrays of one device.


def common_pages(page_tokens: int, length_A: Array, page_table_AI: Array) -> Array:
    """How many first pages all chunks have in common, as far as each reads; the same number for each chunk."""
    first_I = jnp.arange(page_table_AI.shape[1]) * page_tokens
    longest_I = page_table_AI[jnp.argmax(length_A)]
    agrees_AI = (page_table_AI == longest_I) | (first_I >= length_A[:, None])
    is_common_I = agrees_AI.all(axis=0) & (first_I < jnp.max(length_A))
    return jnp.full_like(length_A, jnp.sum(jnp.cumprod(is_common_I)))


def paged_attention(
    q_AKQWH: Array, pools: Sequence[Array], layer: Array, page_table_AI: Array, length_A: Array, shared_pages: Array
) -> OnlineSoftmax:
    """Attention of A chunks of W queries over the first `length_A` entries of their contexts in one layer.

    `pools`: k_LPKHE and v_LPKEH, in int8 also scale_LPK2E. The first `shared_pages` pages are those of all chunks: they
    are read once, as the keys of one row of A * W queries. The others are read for several chunks together, up to the
    end of the longest; so chunks sorted by length are fastest.
    """
    A, K, Q, W, H = q_AKQWH.shape
    E = pools[1].shape[3]
    max_together = min(CPU_CACHE_BYTES // (K * H * E * pools[0].dtype.itemsize), MAX_ROWS_TOGETHER)
    together = max((rows for rows in range(1, max_together + 1) if A % rows == 0), default=1)

    def page(x_LP: Array, number: Array) -> Array:
        return from_bits(jax.lax.dynamic_slice(x_LP, (layer, number, 0, 0, 0), (1, 1, *x_LP.shape[2:]))[0])

    def attend_shared(number: Array, so_far: OnlineSoftmax) -> OnlineSoftmax:
        k_1KHE, v_1KEH, *scale = (page(x_LP, page_table_AI[0, number]) for x_LP in pools)
        mask_XE = number * E + jnp.arange(E) < jnp.repeat(length_A, W)[:, None]
        return combine([so_far, partial_attention(q_1KQXH, k_1KHE, v_1KEH, mask_XE[None], *scale)])

    def attend_together(chunks: tuple[Array, Array, Array]) -> OnlineSoftmax:
        q_AKQWH, page_table_AI, length_A = chunks

        def attend_page(number: Array, so_far: OnlineSoftmax) -> OnlineSoftmax:
            read = [jnp.concatenate([page(x_LP, page_I[number]) for page_I in page_table_AI]) for x_LP in pools]
            k_AKHE, v_AKEH, *scale = read
            mask_AE = number * E + jnp.arange(E) < length_A[:, None]
            return combine([so_far, partial_attention(q_AKQWH, k_AKHE, v_AKEH, mask_AE[:, None], *scale)])

        return jax.lax.fori_loop(shared_pages, -(-jnp.max(length_A) // E), attend_page, empty(q_AKQWH))

    def in_groups(x: Array) -> Array:
        return x.reshape(A // together, together, *x.shape[1:])

    q_1KQXH = jnp.moveaxis(q_AKQWH, 0, 2).reshape(1, K, Q, A * W, H)
    shared = jax.lax.fori_loop(0, shared_pages, attend_shared, empty(q_1KQXH))
    shared = OnlineSoftmax(*(_chunks(x, 0, 3, A) for x in shared))
    own = jax.lax.map(attend_together, (in_groups(q_AKQWH), in_groups(page_table_AI), in_groups(length_A)))
    own = OnlineSoftmax(*(x.reshape(A, *x.shape[2:]) for x in own))
    return combine([shared, own])


def append_to_pages(
    pools: tuple[Array, ...], new: tuple[Array, ...], page_table_AI: Array, start_A: Array, added_A: Array
) -> tuple[Array, ...]:
    """The pools with the first `added_A` tokens of each chunk at entries start, start + 1, ... of its context.

    `new`: keys and values [L, A, K, W, H], and scales [L, A, K, W, 2]. Tokens past the last page are dropped. The
    writes are slice updates in a loop, which the compiler does in place: for a scatter it would convert the layout of
    the whole cache and back. In each page that a chunk reaches, one window of fixed width is rewritten: each entry
    takes its new token or keeps its value. A window that would pass the page's end starts earlier, as XLA shifts it.
    """
    L, A, _, W, _ = new[0].shape
    context_pages = page_table_AI.shape[1]
    E = pools[1].shape[3]
    window = min(W, E)

    def write_chunk(chunk: Array, pools: tuple[Array, ...]) -> tuple[Array, ...]:
        start = start_A[chunk]
        added = added_A[chunk]
        new_LKW = [jax.lax.dynamic_index_in_dim(x, chunk, 1, keepdims=False) for x in new]

        def write_page(reached: Array, pools: tuple[Array, ...]) -> tuple[Array, ...]:
            number = start // E + reached
            page = page_table_AI[chunk, number]
            first = jnp.clip(start - number * E, 0, E - window)
            token_E = number * E + first + jnp.arange(window) - start
            is_new_E1 = ((token_E >= 0) & (token_E < added))[:, None]

            def write(x_LP: Array, new_LKWH: Array, entry_axis: int) -> Array:
                new_L1KEH = jnp.take(new_LKWH, token_E, axis=2, mode="clip")[:, None].astype(x_LP.dtype)
                corner = [0, page, 0, 0, 0]
                corner[entry_axis] = first
                shape = [L, 1, *x_LP.shape[2:]]
                shape[entry_axis] = window
                old_L1 = jax.lax.dynamic_slice(x_LP, corner, shape)
                entries_are_last = entry_axis == 4
                new_L1 = jnp.swapaxes(new_L1KEH, 3, 4) if entries_are_last else new_L1KEH
                is_new = is_new_E1[:, 0] if entries_are_last else is_new_E1
                return jax.lax.dynamic_update_slice(x_LP, jnp.where(is_new, new_L1, old_L1), corner)

            return tuple(map(write, pools, new_LKW, ENTRY_AXES))

        reach = jnp.where(added > 0, (start + added - 1) // E - start // E + 1, 0)
        return jax.lax.fori_loop(0, jnp.minimum(reach, context_pages - start // E), write_page, pools)

    return jax.lax.fori_loop(0, A, write_chunk, pools)


def _chunks(x: Array, row_axis: int, token_axis: int, chunks: int) -> Array:
    """[..., B, ..., T, ...] -> [..., A, ..., W, ...]: the rows cut into `chunks` chunks of equal width, in order."""
    B = x.shape[row_axis]
    T = x.shape[token_axis]
    split = (*x.shape[:token_axis], chunks // B, B * T // chunks, *x.shape[token_axis + 1 :])
    moved = jnp.moveaxis(x.reshape(split), token_axis, row_axis + 1)
    return moved.reshape(*moved.shape[:row_axis], chunks, *moved.shape[row_axis + 2 :])


def _rows(x_AKQW: Array, rows: int) -> Array:
    """[A, K, Q, W, ...] -> [B, K, Q, T, ...]: the inverse of `_chunks`."""
    A, K, Q, W = x_AKQW.shape[:4]
    x_BKQAW = jnp.moveaxis(x_AKQW.reshape(rows, A // rows, *x_AKQW.shape[1:]), 1, 3)
    return x_BKQAW.reshape(rows, K, Q, A // rows * W, *x_AKQW.shape[4:])
