"""The KV cache: an argument and a result of `qwen.forward`, never hidden state.

A block of tokens either stands row for row with the cache, or is cut into pieces that name the rows that they belong
to (`row_A`). On a mesh each device holds its own part of the rows: then `row_A` has an equal share for each part, in
order, and its numbers count from the part's first row. A number past the part's last row means nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from memsearcher_jax.model import pages
from memsearcher_jax.model.attention import Partial, Past, look
from memsearcher_jax.model.axes import constrain, per_device
from memsearcher_jax.model.config import ModelConfig

CACHE_AXES = ("layers", "batch", None, "kv", None, None)
"""Logical axes of k_LBNKHP and of v_LBNKPH; `length_B` has ("batch",)."""

RECENT_AXES = ("layers", "batch", "kv", None, None)
"""Logical axes of `Recent`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of B rows with room for N pages of P entries, which belong to the row's tokens in order."""

    k_LBNKHP: jax.Array  # in compute_dtype, already rotated; entries from length_B on mean nothing
    v_LBNKPH: jax.Array  # in compute_dtype, always finite: what is not looked at is multiplied by 0
    length_B: jax.Array  # int32: tokens that each row holds

    @classmethod
    def empty(cls, config: ModelConfig, rows: int, capacity: int, page: int = 0) -> Cache:
        """A cache that holds nothing, with room for `capacity` tokens and for what fills the last page.

        A page has `page` entries, or what suits the capacity.

        Call it under jit where it is to be spread over a mesh from the start.
        """
        page = page or pages.page_for(capacity)
        shape_LBNK = (config.layers, rows, -(-capacity // page), config.kv_heads)
        return cls(
            k_LBNKHP=constrain(jnp.zeros((*shape_LBNK, config.head_size, page), config.compute_dtype), CACHE_AXES),
            v_LBNKPH=constrain(jnp.zeros((*shape_LBNK, page, config.head_size), config.compute_dtype), CACHE_AXES),
            length_B=jnp.zeros(rows, jnp.int32),
        )

    @property
    def page(self) -> int:
        """Entries of a page."""
        return self.v_LBNKPH.shape[4]

    @property
    def capacity(self) -> int:
        """Tokens that a row has room for."""
        return self.v_LBNKPH.shape[2] * self.page

    def read(self, layer: jax.Array) -> list[Past]:
        """One layer of all rows, for the tokens that come next."""
        return Reading.of(self).read(layer)

    def append(self, k_LBKTH: jax.Array, v_LBKTH: jax.Array, segment_BT: jax.Array) -> Cache:
        """All rows with their real tokens (segment 1, before any padding) behind what they hold.

        Tokens past the capacity are dropped, but `length_B` counts them: a row that overflowed shows it.
        Raises ValueError for a block wider than the cache.
        """
        return Reading.of(self).append(k_LBKTH, v_LBKTH, segment_BT)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prefix:
    """What many rows begin with, held once: their own entries are those of the tokens behind it."""

    cache: Cache  # of one row and one page
    begins_A: jax.Array  # bool: which pieces' rows begin with it

    def read(self, layer: jax.Array) -> Past:
        """One layer. All queries at once meet the same keys: one product of matrices, and the keys are read once."""
        cache = self.cache
        k_1KHP, v_1KPH = cache.k_LBNKHP[layer, 0], cache.v_LBNKPH[layer, 0]
        is_held_P = jnp.arange(cache.page) < cache.length_B

        def look_at_prefix(q_BKGTH: jax.Array) -> Partial:
            B, K, G, T, H = q_BKGTH.shape
            begins_X = jnp.repeat(self.begins_A, B * T // self.begins_A.shape[0])
            q_1KGXH = jnp.moveaxis(q_BKGTH, 0, 2).reshape(1, K, G, B * T, H)
            found = look(q_1KGXH, k_1KHP, v_1KPH, (begins_X[:, None] & is_held_P)[None])
            return Partial(*(jnp.moveaxis(x[0].reshape(K, G, B, T, *x.shape[4:]), 2, 0) for x in found))

        return look_at_prefix


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Reading:
    """A cache, and which of its rows a block reads and how far: the block's A pieces in order. Made by `of`."""

    cache: Cache
    row_A: jax.Array | None  # int32: rows that the pieces belong to, as at the top; None: a piece is a row, in order
    start_A: jax.Array  # int32: entry at which a piece's first token will stand
    length_A: jax.Array  # int32: entries that each piece reads
    order_A: jax.Array  # int32: the pieces by length, the longest first; numbers within a device's part
    rank_A: jax.Array  # int32: where in that order each piece stands
    prefix: Prefix | None

    @classmethod
    def of(
        cls,
        cache: Cache,
        row_A: jax.Array | None = None,
        start_A: jax.Array | None = None,
        reads_A: jax.Array | None = None,
        prefix: Prefix | None = None,
    ) -> Reading:
        """Pieces read all that their rows hold, and nothing where `reads_A` is False.

        Pieces of one row stand side by side in the block, each but the last one full, and `start_A` must tell them
        apart; by default a piece goes behind what its row holds.
        """
        length_A = cache.length_B
        if row_A is not None:
            length_A = take_rows(length_A, row_A)
        start_A = length_A if start_A is None else start_A
        if reads_A is not None:
            length_A = jnp.where(reads_A, length_A, 0)
        sort = per_device(lambda x_A: jnp.argsort(x_A).astype(jnp.int32), (("batch",),), ("batch",))
        order_A = sort(-length_A)
        return cls(cache, row_A, start_A, length_A, order_A, sort(order_A), prefix)

    def read(self, layer: jax.Array) -> list[Past]:
        """One layer. Pages are slices out of the whole cache, so that what is not read costs nothing."""
        prefix = [] if self.prefix is None else [self.prefix.read(layer)]
        return [*prefix, partial(self._look_at_rows, layer)]

    def append(self, k_LBKTH: jax.Array, v_LBKTH: jax.Array, segment_BT: jax.Array) -> Cache:
        """As `Cache.append`, to the rows that are read; a segment above 0 is a real token."""
        cache, pieces = self.cache, self.start_A.shape[0]
        width = segment_BT.size // pieces
        if width > cache.capacity:
            raise ValueError(
                f"a block of {width} tokens cannot be written to a cache of {cache.capacity}: split the block"
            )
        added_A = jnp.sum(segment_BT.reshape(pieces, width) > 0, axis=1, dtype=jnp.int32)
        where = (self.start_A, added_A) if self.row_A is None else (self.start_A, added_A, self.row_A)
        axes = (("batch",),) * len(where)

        def write(axis: int, old_LBN: jax.Array, new_LBKTH: jax.Array) -> jax.Array:
            write = per_device(partial(pages.write, axis, width), (CACHE_AXES, RECENT_AXES, *axes), CACHE_AXES)
            return constrain(write(old_LBN, new_LBKTH, *where), CACHE_AXES)

        return Cache(
            k_LBNKHP=write(5, cache.k_LBNKHP, k_LBKTH),
            v_LBNKPH=write(4, cache.v_LBNKPH, v_LBKTH),
            length_B=per_device(_lengthen, (("batch",), *axes), ("batch",))(cache.length_B, *where),
        )

    def _look_at_rows(self, layer: jax.Array, q_BKGTH: jax.Array) -> Partial:
        cache, row = self.cache, ("batch",)
        query_axes, number_axes = ("batch", "kv", None, None, None), ("batch", "kv", None, None)
        row_A = self.row_A
        if row_A is None:
            row_A = per_device(lambda x_A: jnp.arange(x_A.shape[0]), (row,), row)(self.length_A)
        look_at = per_device(
            pages.look_at_rows,
            (query_axes, CACHE_AXES, CACHE_AXES, (), row, row, row, row),
            [number_axes, number_axes, query_axes],
            [q_BKGTH.shape[:-1], q_BKGTH.shape[:-1], q_BKGTH.shape],
        )
        pieces = (row_A, self.length_A, self.order_A, self.rank_A)
        return Partial(*look_at(q_BKGTH, cache.k_LBNKHP, cache.v_LBNKPH, layer, *pieces))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Recent:
    """Tokens of B of its rows that the cache has not taken in yet: J entries per row, in their order, with gaps.

    All rows write at the same entry, which is one slice update for the whole batch and not one per row. A decoding
    loop gathers its tokens here and moves them to the cache once, at its end.
    """

    k_LBKJH: jax.Array  # in compute_dtype, already rotated
    v_LBKJH: jax.Array  # in compute_dtype
    visible_BJ: jax.Array  # bool: False in gaps, and where nothing is written yet
    used: jax.Array  # int32: entries written, gaps included

    @classmethod
    def empty(cls, cache: Cache, rows: int, entries: int) -> Recent:
        """Room for so many entries of so many of the cache's rows."""
        L, _, _, K, _, H = cache.v_LBNKPH.shape
        zeros_LBKJH = constrain(jnp.zeros((L, rows, K, entries, H), cache.v_LBNKPH.dtype), RECENT_AXES)
        return cls(zeros_LBKJH, zeros_LBKJH, jnp.zeros((rows, entries), bool), jnp.int32(0))

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

    reading: Reading  # of the rows that `recent` has, in the same order
    recent: Recent

    def read(self, layer: jax.Array) -> list[Past]:
        """One layer of both."""
        recent = self.recent
        k_BKHJ, v_BKJH = jnp.swapaxes(recent.k_LBKJH[layer], 2, 3), recent.v_LBKJH[layer]
        visible_B1J = recent.visible_BJ[:, None, :]
        return [*self.reading.read(layer), lambda q_BKGTH: look(q_BKGTH, k_BKHJ, v_BKJH, visible_B1J)]

    def append(self, k_LBKTH: jax.Array, v_LBKTH: jax.Array, segment_BT: jax.Array) -> Recent:
        """The recent tokens with T more entries, visible where the segment is not 0."""
        recent = self.recent
        at = (0, 0, 0, recent.used, 0)
        return Recent(
            k_LBKJH=constrain(jax.lax.dynamic_update_slice(recent.k_LBKJH, k_LBKTH, at), RECENT_AXES),
            v_LBKJH=constrain(jax.lax.dynamic_update_slice(recent.v_LBKJH, v_LBKTH, at), RECENT_AXES),
            visible_BJ=jax.lax.dynamic_update_slice(recent.visible_BJ, segment_BT > 0, (0, recent.used)),
            used=recent.used + segment_BT.shape[1],
        )


def copy_rows(cache: Cache, source_A: jax.Array, target_A: jax.Array, length_A: jax.Array) -> Cache:
    """The rows `target_A` with the first `length_A` entries of the rows `source_A`, one pair after the other.

    Both name rows as at the top. What the targets held is gone.
    """
    copy = per_device(pages.copy_rows, (CACHE_AXES, *(("batch",),) * 3), CACHE_AXES)
    page_A = -(-length_A // cache.page)
    return Cache(
        k_LBNKHP=constrain(copy(cache.k_LBNKHP, source_A, target_A, page_A), CACHE_AXES),
        v_LBNKPH=constrain(copy(cache.v_LBNKPH, source_A, target_A, page_A), CACHE_AXES),
        length_B=put_rows(cache.length_B, target_A, length_A),
    )


def take_rows(x_B: jax.Array, row_A: jax.Array) -> jax.Array:
    """These rows of an array that lies as the cache does, named as at the top; zeros for nobody."""
    axes = ("batch", *[None] * (x_B.ndim - 1))

    def take(x_B: jax.Array, row_A: jax.Array) -> jax.Array:
        return x_B.at[row_A].get(mode="fill", fill_value=0)

    return per_device(take, (axes, ("batch",)), axes, (*row_A.shape, *x_B.shape[1:]))(x_B, row_A)


def put_rows(x_B: jax.Array, row_A: jax.Array, new_A: jax.Array) -> jax.Array:
    """The same array with these rows in place of its own."""
    axes = ("batch", *[None] * (x_B.ndim - 1))

    def put(x_B: jax.Array, row_A: jax.Array, new_A: jax.Array) -> jax.Array:
        return x_B.at[row_A].set(new_A, mode="drop")

    return per_device(put, (axes, ("batch",), axes), axes)(x_B, row_A, new_A)


def _lengthen(length_B: jax.Array, start_A: jax.Array, added_A: jax.Array, row_A: jax.Array | None = None) -> jax.Array:
    return start_A + added_A if row_A is None else length_B.at[row_A].max(start_A + added_A, mode="drop")
