"""The KV cache: an argument and a result of `qwen.forward`, never hidden state.

A block of tokens either stands row for row with the cache, or names the rows that it belongs to (`row_A`). On a mesh
each device holds its own part of the rows: then `row_A` has an equal share for each part, in order, and its numbers
count from the part's first row. A number past the part's last row means nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from memsearcher_jax.model.attention import Past
from memsearcher_jax.model.axes import constrain, per_device
from memsearcher_jax.model.config import ModelConfig

CACHE_AXES = ("layers", "batch", "kv", None, None)
"""Logical axes of k_LBKCH and v_LBKCH; `length_B` has ("batch",)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of B rows with capacity C: entry j of a row belongs to the token at position j."""

    k_LBKCH: jax.Array  # in compute_dtype, already rotated; entries from length_B on mean nothing
    v_LBKCH: jax.Array  # in compute_dtype; entries from length_B on must be finite: they are multiplied by 0
    length_B: jax.Array  # int32: tokens that each row holds

    @classmethod
    def empty(cls, config: ModelConfig, rows: int, capacity: int) -> Cache:
        """A cache that holds nothing. Call it under jit where it is to be spread over a mesh from the start."""
        shape_LBKCH = (config.layers, rows, config.kv_heads, capacity, config.head_size)
        return cls(
            k_LBKCH=constrain(jnp.zeros(shape_LBKCH, config.compute_dtype), CACHE_AXES),
            v_LBKCH=constrain(jnp.zeros(shape_LBKCH, config.compute_dtype), CACHE_AXES),
            length_B=jnp.zeros(rows, jnp.int32),
        )

    @property
    def capacity(self) -> int:
        """Tokens that a row has room for."""
        return self.k_LBKCH.shape[3]

    def read(self, layer: jax.Array) -> list[Past]:
        """One layer of all rows, for the tokens that come next."""
        return Reading(self, self.capacity).read(layer)

    def append(self, k_LBKTH: jax.Array, v_LBKTH: jax.Array, segment_BT: jax.Array) -> Cache:
        """All rows with their real tokens (segment 1, before any padding) behind what they hold.

        Tokens past the capacity are dropped, but `length_B` counts them: a row that overflowed shows it.
        Raises ValueError for a block wider than the cache.
        """
        return Reading(self, self.capacity).append(k_LBKTH, v_LBKTH, segment_BT)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Reading:
    """A cache of which a block of tokens reads a prefix of every row, and perhaps a few rows alone."""

    cache: Cache
    window: int = field(metadata={"static": True})  # entries that are read; no row that matters may hold more
    row_A: jax.Array | None = None  # int32: rows that the block's rows belong to, as at the top; None: all, in order

    def read(self, layer: jax.Array) -> list[Past]:
        """One layer. A slice out of the whole cache, so that what lies outside costs nothing."""
        k_LBKCH, v_LBKCH = self.cache.k_LBKCH, self.cache.v_LBKCH
        _, B, K, _, H = k_LBKCH.shape
        window, row_A, length_A = self.window, self.row_A, self.cache.length_B

        def read_rows(x_LBKCH: jax.Array, layer: jax.Array, row_A: jax.Array) -> jax.Array:
            shape = (1, 1, x_LBKCH.shape[2], window, H)
            return jnp.concatenate([jax.lax.dynamic_slice(x_LBKCH, (layer, row, 0, 0, 0), shape)[0] for row in row_A])

        if row_A is None:
            start, shape = (layer, 0, 0, 0, 0), (1, B, K, window, H)
            k_AKWH, v_AKWH = (jax.lax.dynamic_slice(x_LBKCH, start, shape)[0] for x_LBKCH in (k_LBKCH, v_LBKCH))
        else:
            shape = (row_A.shape[0], K, window, H)
            read = per_device(read_rows, (CACHE_AXES, (), ("batch",)), CACHE_AXES[1:], shape)
            k_AKWH, v_AKWH = read(k_LBKCH, layer, row_A), read(v_LBKCH, layer, row_A)
            length_A = per_device(_lengths, (("batch",), ("batch",)), ("batch",), row_A.shape)(length_A, row_A)
        return [(k_AKWH, v_AKWH, (jnp.arange(window) < length_A[:, None])[:, None, :])]

    def append(self, k_LAKTH: jax.Array, v_LAKTH: jax.Array, segment_AT: jax.Array) -> Cache:
        """As `Cache.append`, to the rows that are read."""
        cache, width = self.cache, segment_AT.shape[1]
        if width > cache.capacity:
            raise ValueError(
                f"a block of {width} tokens cannot be written to a cache of {cache.capacity}: split the block"
            )
        added_A = jnp.sum(segment_AT > 0, axis=1, dtype=jnp.int32)
        where = (cache.length_B, added_A) if self.row_A is None else (cache.length_B, added_A, self.row_A)
        axes = (("batch",),) * len(where)
        write = per_device(_write, (CACHE_AXES, CACHE_AXES, *axes), CACHE_AXES)
        return Cache(
            k_LBKCH=constrain(write(cache.k_LBKCH, k_LAKTH, *where), CACHE_AXES),
            v_LBKCH=constrain(write(cache.v_LBKCH, v_LAKTH, *where), CACHE_AXES),
            length_B=per_device(_lengthen, axes, ("batch",))(*where),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Recent:
    """Tokens of B rows that the cache has not taken in yet: J entries per row, in their order, with gaps.

    All rows write at the same entry, which is one slice update for the whole batch and not one per row. A decoding
    loop gathers its tokens here and moves them to the cache once, at its end.
    """

    k_LBKJH: jax.Array  # in compute_dtype, already rotated
    v_LBKJH: jax.Array  # in compute_dtype
    visible_BJ: jax.Array  # bool: False in gaps, and where nothing is written yet
    used: jax.Array  # int32: entries written, gaps included

    @classmethod
    def empty(cls, cache: Cache, entries: int) -> Recent:
        """Room for so many entries of each of the cache's rows."""
        L, B, K, _, H = cache.k_LBKCH.shape
        zeros_LBKJH = constrain(jnp.zeros((L, B, K, entries, H), cache.k_LBKCH.dtype), CACHE_AXES)
        return cls(zeros_LBKJH, zeros_LBKJH, jnp.zeros((B, entries), bool), jnp.int32(0))

    def with_visible(self, visible_BT: jax.Array, at: jax.Array) -> Recent:
        """The same entries, those from `at` on as visible as it says."""
        return replace(self, visible_BJ=jax.lax.dynamic_update_slice(self.visible_BJ, visible_BT, (0, at)))

    def closed_up(self) -> Recent:
        """The same tokens in the same order with the gaps behind them, as `Cache.append` wants padding."""
        order_BJ = jnp.argsort(~self.visible_BJ, axis=1, stable=True)
        order_1B1J1 = order_BJ[None, :, None, :, None]
        return Recent(
            k_LBKJH=jnp.take_along_axis(self.k_LBKJH, order_1B1J1, axis=3),
            v_LBKJH=jnp.take_along_axis(self.v_LBKJH, order_1B1J1, axis=3),
            visible_BJ=jnp.take_along_axis(self.visible_BJ, order_BJ, axis=1),
            used=self.used,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Growing:
    """A cache that stays as it is, and the recent tokens behind it, to which new ones are added."""

    reading: Reading  # of all rows
    recent: Recent

    def read(self, layer: jax.Array) -> list[Past]:
        """One layer of both."""
        k_BKJH, v_BKJH = self.recent.k_LBKJH[layer], self.recent.v_LBKJH[layer]
        return [*self.reading.read(layer), (k_BKJH, v_BKJH, self.recent.visible_BJ[:, None, :])]

    def append(self, k_LBKTH: jax.Array, v_LBKTH: jax.Array, segment_BT: jax.Array) -> Recent:
        """The recent tokens with T more entries, visible where the segment is not 0."""
        recent = self.recent
        at = (0, 0, 0, recent.used, 0)
        return Recent(
            k_LBKJH=constrain(jax.lax.dynamic_update_slice(recent.k_LBKJH, k_LBKTH, at), CACHE_AXES),
            v_LBKJH=constrain(jax.lax.dynamic_update_slice(recent.v_LBKJH, v_LBKTH, at), CACHE_AXES),
            visible_BJ=jax.lax.dynamic_update_slice(recent.visible_BJ, segment_BT > 0, (0, recent.used)),
            used=recent.used + segment_BT.shape[1],
        )


def copy_rows(cache: Cache, source_A: jax.Array, target_A: jax.Array, length_A: jax.Array, window: int) -> Cache:
    """The rows `target_A` with the first `length_A` entries of the rows `source_A`, one pair after the other.

    Both name rows as at the top; `window` is static, and at least every length. What the targets held is gone.
    """

    def copy(x_LBKCH: jax.Array, source_A: jax.Array, target_A: jax.Array) -> jax.Array:
        L, B, K, _, H = x_LBKCH.shape

        def copy_row(pair: jax.Array, x_LBKCH: jax.Array) -> jax.Array:
            # Where there is nobody, a slice past the end would land on the last row: let it be copied onto itself.
            somebody = target_A[pair] < B
            source = jnp.where(somebody, source_A[pair], B - 1)
            target = jnp.where(somebody, target_A[pair], B - 1)
            row_L1KWH = jax.lax.dynamic_slice(x_LBKCH, (0, source, 0, 0, 0), (L, 1, K, window, H))
            return jax.lax.dynamic_update_slice(x_LBKCH, row_L1KWH, (0, target, 0, 0, 0))

        return jax.lax.fori_loop(0, source_A.shape[0], copy_row, x_LBKCH)

    copy = per_device(copy, (CACHE_AXES, ("batch",), ("batch",)), CACHE_AXES)
    return Cache(
        k_LBKCH=constrain(copy(cache.k_LBKCH, source_A, target_A), CACHE_AXES),
        v_LBKCH=constrain(copy(cache.v_LBKCH, source_A, target_A), CACHE_AXES),
        length_B=_set_lengths(cache.length_B, target_A, length_A),
    )


def clear_rows(cache: Cache, row_A: jax.Array) -> Cache:
    """The rows `row_A` as in an empty cache. What is not finite would outlive its length: 0 times NaN is NaN."""

    def clear(x_LBKCH: jax.Array, row_A: jax.Array) -> jax.Array:
        L, B, K, C, H = x_LBKCH.shape

        def clear_row(index: jax.Array, x_LBKCH: jax.Array) -> jax.Array:
            start = (0, row_A[index], 0, 0, 0)
            standing_L1KCH = jax.lax.dynamic_slice(x_LBKCH, start, (L, 1, K, C, H))
            cleared_L1KCH = jnp.where(row_A[index] < B, jnp.zeros_like(standing_L1KCH), standing_L1KCH)
            return jax.lax.dynamic_update_slice(x_LBKCH, cleared_L1KCH, start)

        return jax.lax.fori_loop(0, row_A.shape[0], clear_row, x_LBKCH)

    clear = per_device(clear, (CACHE_AXES, ("batch",)), CACHE_AXES)
    return Cache(
        k_LBKCH=constrain(clear(cache.k_LBKCH, row_A), CACHE_AXES),
        v_LBKCH=constrain(clear(cache.v_LBKCH, row_A), CACHE_AXES),
        length_B=_set_lengths(cache.length_B, row_A, jnp.zeros_like(row_A)),
    )


def _set_lengths(length_B: jax.Array, row_A: jax.Array, new_A: jax.Array) -> jax.Array:
    def put(length_B: jax.Array, row_A: jax.Array, new_A: jax.Array) -> jax.Array:
        return length_B.at[row_A].set(new_A, mode="drop")

    return per_device(put, (("batch",),) * 3, ("batch",))(length_B, row_A, new_A)


def _lengths(length_B: jax.Array, row_A: jax.Array) -> jax.Array:
    return length_B.at[row_A].get(mode="fill", fill_value=0)


def _lengthen(length_B: jax.Array, added_A: jax.Array, row_A: jax.Array | None = None) -> jax.Array:
    return length_B + added_A if row_A is None else length_B.at[row_A].add(added_A, mode="drop")


def _write(
    old_LBKCH: jax.Array,
    new_LAKTH: jax.Array,
    length_B: jax.Array,
    added_A: jax.Array,
    row_A: jax.Array | None = None,
) -> jax.Array:
    """The cache with tokens 0 .. added - 1 of each block at length, length + 1, ... of its row; all else as it was.

    A loop of slice updates, because it is what every compiler does in place: for a scatter, TPU and CPU turn the whole
    cache into another layout and back. A row's write is one window of fixed width. Near the end the window starts
    before `length`, since a slice that runs past the end would be moved back whole; so each of its entries picks its
    token, or what stands there already. Nobody adds nothing: the last row, where its window lands, keeps what it has.
    """
    width, capacity = new_LAKTH.shape[3], old_LBKCH.shape[3]

    def write_row(block: jax.Array, cache_LBKCH: jax.Array) -> jax.Array:
        row = block if row_A is None else row_A[block]
        length, added = length_B[row], added_A[block]
        start = jnp.minimum(length, capacity - width)
        token_T = start + jnp.arange(width) - length
        is_new_T1 = ((token_T >= 0) & (token_T < added))[:, None]
        block_L1KTH = jax.lax.dynamic_slice_in_dim(new_LAKTH, block, 1, axis=1).astype(cache_LBKCH.dtype)
        new_L1KTH = jnp.take(block_L1KTH, token_T, axis=3, mode="clip")
        window = (0, row, 0, start, 0)
        standing_L1KTH = jax.lax.dynamic_slice(cache_LBKCH, window, new_L1KTH.shape)
        return jax.lax.dynamic_update_slice(cache_LBKCH, jnp.where(is_new_T1, new_L1KTH, standing_L1KTH), window)

    return jax.lax.fori_loop(0, new_LAKTH.shape[1], write_row, old_LBKCH)
