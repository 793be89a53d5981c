"""The cache in pages: rows are read, copied and written page by page, each only as far as it holds something.

A row's entries lie in N pages of P: keys in k_LBNKHP, values in v_LBNKPH, so that a page is one piece of memory for
all heads, cut off at leading axes only. Arrays here are those of one device.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from memsearcher_jax.model.attention import Partial, look, merge, nothing

PAGES = {1_024: 128, 4_096: 256}
"""Entries of a page in rows with room for at most so many: the longer a row, the less an unused end of it costs, and
the more the work on each page."""

LONGEST_PAGE = 512
"""Entries of a page in rows that are longer still."""

TOGETHER = 8
"""Rows whose pages are read side by side, as far as the longest of them holds: neighbours in length."""

NEAR_A_CORE = 1 << 17
"""Bytes of keys that are read side by side on a CPU, where they stay in a core's cache with the values and scores."""


def page_for(capacity: int) -> int:
    """Entries of a page in rows with room for so many; a row that has room for less than a page is one page."""
    return min(capacity, next((page for most, page in PAGES.items() if capacity <= most), LONGEST_PAGE))


def look_at_rows(
    q_BKGTH: jax.Array,
    k_LBNKHP: jax.Array,
    v_LBNKPH: jax.Array,
    layer: jax.Array,
    row_A: jax.Array,
    length_A: jax.Array,
    order_A: jax.Array,
    rank_A: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A `Partial`, field by field, over the first `length_A` entries of the rows `row_A` in one layer.

    The queries are cut into A pieces of equal width, A / B of each row, and each piece looks at a row of its own.
    `order_A` sorts the pieces by length, `rank_A` undoes it.
    """
    near = NEAR_A_CORE // (k_LBNKHP[0, 0, 0].size * k_LBNKHP.dtype.itemsize)
    look_by = partial(look_side_by_side, q_BKGTH, k_LBNKHP, v_LBNKPH, layer, row_A, length_A, order_A, rank_A)
    return jax.lax.platform_dependent(cpu=partial(look_by, min(near, TOGETHER)), default=partial(look_by, TOGETHER))


def look_side_by_side(
    q_BKGTH: jax.Array,
    k_LBNKHP: jax.Array,
    v_LBNKPH: jax.Array,
    layer: jax.Array,
    row_A: jax.Array,
    length_A: jax.Array,
    order_A: jax.Array,
    rank_A: jax.Array,
    most: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `look_at_rows`, the pages of at most so many rows at one time, and of at least one."""
    B, K, G, T, H = q_BKGTH.shape
    A, page = row_A.shape[0], v_LBNKPH.shape[4]
    cut, together = A // B, max((count for count in range(1, most + 1) if A % count == 0), default=1)

    def look_together(pieces: tuple[jax.Array, jax.Array, jax.Array]) -> Partial:
        q_RKGWH, row_R, length_R = pieces

        def look_further(number: jax.Array, so_far: Partial) -> Partial:
            k_RKHP = jnp.concatenate([_page_of(k_LBNKHP, layer, row, number) for row in row_R])
            v_RKPH = jnp.concatenate([_page_of(v_LBNKPH, layer, row, number) for row in row_R])
            visible_RP = number * page + jnp.arange(page) < length_R[:, None]
            return merge([so_far, look(q_RKGWH, k_RKHP, v_RKPH, visible_RP[:, None])])

        return jax.lax.fori_loop(0, -(-jnp.max(length_R) // page), look_further, nothing(q_RKGWH))

    q_AKGWH = jnp.moveaxis(q_BKGTH.reshape(B, K, G, cut, T // cut, H), 3, 1).reshape(A, K, G, T // cut, H)
    sorted_ = [x[order_A].reshape(A // together, together, *x.shape[1:]) for x in (q_AKGWH, row_A, length_A)]
    found = jax.lax.map(look_together, tuple(sorted_))
    return tuple(_joined(x.reshape(A, *x.shape[2:])[rank_A], B) for x in found)


def copy_rows(x_LBN: jax.Array, source_A: jax.Array, target_A: jax.Array, page_A: jax.Array) -> jax.Array:
    """The rows `target_A` with the first `page_A` pages of the rows `source_A`, one pair after the other."""
    L, B = x_LBN.shape[:2]

    def copy_pair(pair: jax.Array, x_LBN: jax.Array) -> jax.Array:
        def copy_page(number: jax.Array, x_LBN: jax.Array) -> jax.Array:
            page_L11 = jax.lax.dynamic_slice(x_LBN, (0, source_A[pair], number, 0, 0, 0), (L, 1, 1, *x_LBN.shape[3:]))
            return jax.lax.dynamic_update_slice(x_LBN, page_L11, (0, target_A[pair], number, 0, 0, 0))

        # A pair of nobody, for whom a slice would land on the last row, has no page.
        return jax.lax.fori_loop(0, jnp.where(target_A[pair] < B, page_A[pair], 0), copy_page, x_LBN)

    return jax.lax.fori_loop(0, source_A.shape[0], copy_pair, x_LBN)


def write(
    axis: int,
    width: int,
    old_LBN: jax.Array,
    new_LBKTH: jax.Array,
    start_A: jax.Array,
    added_A: jax.Array,
    row_A: jax.Array | None = None,
) -> jax.Array:
    """The cache with tokens 0 .. added - 1 of each piece at start, start + 1, ... of its row; all else as it was.

    Pieces have `width` tokens; entries lie along `axis` of a page, which is 4 for values and 5 for keys. What has no
    page is dropped. A loop of slice updates, because it is what every compiler does in place: for a scatter, TPU and
    CPU turn the whole cache into another layout and back. In each page that a piece may reach, one window of fixed
    width is rewritten: each of its entries picks its token, or what stands there already. A window that would run past
    the page's end begins earlier, since a slice is moved back whole. Nobody adds nothing: the last row, where its
    windows land, keeps what it has.
    """
    pages, page, cut = old_LBN.shape[2], old_LBN.shape[axis], new_LBKTH.shape[3] // width
    window = min(width, page)
    L, _, K, _, H = new_LBKTH.shape

    def write_piece(piece: jax.Array, cache_LBN: jax.Array) -> jax.Array:
        row = piece if row_A is None else row_A[piece]
        start, added = start_A[piece], added_A[piece]
        at = (0, piece // cut, 0, piece % cut * width, 0)
        piece_L1KWH = jax.lax.dynamic_slice(new_LBKTH, at, (L, 1, K, width, H)).astype(cache_LBN.dtype)

        def write_page(reached: jax.Array, cache_LBN: jax.Array) -> jax.Array:
            number = start // page + reached
            first = jnp.clip(start - number * page, 0, page - window)
            token_X = number * page + first + jnp.arange(window) - start
            is_new_X1 = ((token_X >= 0) & (token_X < added) & (number < pages))[:, None]
            new_L11KXH = jnp.take(piece_L1KWH, token_X, axis=3, mode="clip")[:, :, None]
            corner, shape = [0, row, number, 0, 0, 0], [L, 1, 1, *cache_LBN.shape[3:]]
            corner[axis], shape[axis] = first, window
            standing_L11 = jax.lax.dynamic_slice(cache_LBN, corner, shape)
            if axis == 5:
                new_L11, is_new = jnp.swapaxes(new_L11KXH, 4, 5), is_new_X1[:, 0]
            else:
                new_L11, is_new = new_L11KXH, is_new_X1
            return jax.lax.dynamic_update_slice(cache_LBN, _row_major(jnp.where(is_new, new_L11, standing_L11)), corner)

        reach = jnp.where(added > 0, (start + added - 1) // page - start // page + 1, 0)
        return jax.lax.fori_loop(0, reach, write_page, cache_LBN)

    return jax.lax.fori_loop(0, start_A.shape[0], write_piece, old_LBN)


def _page_of(x_LBN: jax.Array, layer: jax.Array, row: jax.Array, number: jax.Array) -> jax.Array:
    """A page of a row in one layer, [1, K, ...]."""
    return jax.lax.dynamic_slice(x_LBN, (layer, row, number, 0, 0, 0), (1, 1, 1, *x_LBN.shape[3:]))[0, 0]


def _row_major(x: jax.Array) -> jax.Array:
    """Left to itself the TPU compiler lays a block of new entries out by layer, and the whole cache after it."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _joined(x_AKGW: jax.Array, rows: int) -> jax.Array:
    """The pieces of each row side by side again: [B, K, G, T, ...]."""
    A, K, G, W, *rest = x_AKGW.shape
    return jnp.moveaxis(x_AKGW.reshape(rows, A // rows, K, G, W, *rest), 1, 3).reshape(rows, K, G, -1, *rest)
