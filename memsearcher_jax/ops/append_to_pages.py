"""Appending to the pages of the KV cache as a Pallas kernel for TPUs. Arrays are those of one device.

Pools are those of `paged_attention`. The kernel changes them in place, a page at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memsearcher_jax.ops.attention import einsum_f32
from memsearcher_jax.ops.paged_attention import HBM, LANES, as_stored
from memsearcher_jax.ops.vmem import vmem_bytes

APPEND_SHARE = 3 / 4
"""The most of a core's memory that an append takes for one page and the tokens of one chunk, of several layers."""


def append_to_pages(
    pools: tuple[Array, ...], new: tuple[Array, ...], page_table_AI: Array, start_A: Array, added_A: Array
) -> tuple[Array, ...]:
    """The pools, updated in place: the first `added_A` tokens of each chunk become entries start, start + 1, ...

    `new`: keys and values [L, A, K, W, H], and scales [L, A, K, W, 2]. Tokens past the last page are dropped. Chunks
    are appended one after the other, so that several may share a page. Values must be finite, and so must the keys of a
    token, unless all are NaN.
    """
    L = new[0].shape[0]
    A = new[0].shape[1]
    H = new[0].shape[4]
    # With 2 as the last dimension the compiler would pad each pair of scales to a whole row of lanes.
    new = (*new[:2], *(jnp.swapaxes(x_LAKW2, 3, 4) for x_LAKW2 in new[2:]))
    stored = [pools[0], as_stored(pools[1], H), *pools[2:]]
    scalars = (page_table_AI.reshape(-1), start_A, added_A)
    parts = _layer_parts(stored, new)
    layers = L // parts
    chunk_specs = [
        pl.BlockSpec((layers, None, *x.shape[2:]), lambda chunk, part, *_: (part, chunk, 0, 0, 0)) for x in new
    ]
    # The pools are results, too: each result aliases its argument.
    pool_specs = [HBM for _ in stored]
    first_pool = len(scalars) + len(new)
    k_LPKHE, v_LPK, *scales = pl.pallas_call(
        partial(_append_kernel, context_pages=page_table_AI.shape[1]),
        out_shape=[[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in stored]],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(A, parts),
            in_specs=[chunk_specs, pool_specs],
            out_specs=[pool_specs],
            scratch_shapes=[
                [pltpu.VMEM((layers, *pool.shape[2:]), pool.dtype) for pool in stored],
                pltpu.SemaphoreType.DMA((len(stored),)),
            ],
        ),
        input_output_aliases={first_pool + i: i for i in range(len(stored))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=vmem_bytes()
        ),
        name="append_to_pages",
    )(*scalars, list(new), stored)[0]
    return k_LPKHE, as_stored(v_LPK, H), *scales


def _layer_parts(pools: Sequence[Array], new: Sequence[Array]) -> int:
    """The fewest equal parts of the layers of which each fits a core, with one page and the tokens of one chunk."""
    L = new[0].shape[0]
    page_bytes = sum(_tiled_bytes(pool.shape[2:], pool.dtype) for pool in pools)
    token_bytes = sum(_tiled_bytes(x.shape[2:], x.dtype) for x in new)
    layer_bytes = page_bytes + 2 * token_bytes  # the next chunk's tokens are copied meanwhile
    most_layers = APPEND_SHARE * vmem_bytes() // layer_bytes
    return next((parts for parts in range(1, L) if L % parts == 0 and L // parts <= most_layers), L)


def _tiled_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Bytes of an array in the memory of a core, whose last two dimensions are padded to whole tiles."""
    *rest, rows, lanes = shape
    itemsize = jnp.dtype(dtype).itemsize
    tile_rows = 32 // itemsize
    return math.prod(rest) * (pl.cdiv(rows, tile_rows) * tile_rows) * (pl.cdiv(lanes, LANES) * LANES) * itemsize


def _append_kernel(
    page_table: Any,  # the rows of page_table_AI, one after the other
    start_A: Any,
    added_A: Any,
    new: Sequence[Any],
    _: Sequence[Any],
    pools: Sequence[Any],  # values [E, H] or [H, E], see `as_stored`
    pages: Sequence[Any],  # for each pool, one page of these layers
    copied: Any,
    *,
    context_pages: int,
):
    """Appends one chunk in a part of the layers: each page that it reaches is copied from HBM, changed, copied back."""
    W = new[0].shape[2]
    layers = new[0].shape[0]
    E = pages[0].shape[3]
    head_size = new[0].shape[3]
    chunk = pl.program_id(0)
    first_layer = pl.program_id(1) * layers
    start = start_A[chunk]
    added = added_A[chunk]
    first = start // E

    def write_page(reached: Any, _: None) -> None:
        page = page_table[chunk * context_pages + first + reached]
        in_pools = [pool.at[pl.ds(first_layer, layers), page] for pool in pools]
        placement = _Placement(tokens=W, entries=E, offset=start - (first + reached) * E, added=added)
        _copy_all(in_pools, pages, copied)

        def write_layer(layer: Any, _: None) -> None:
            k_KWH = _as_float(new[0][layer])
            v_KWH = _as_float(new[1][layer])
            k_LKHE, v_LK, *scales_LK2E = pages
            old_KHE = _as_float(k_LKHE[layer])
            old_K = _as_float(v_LK[layer])
            k_LKHE[layer] = placement.along_lanes(k_KWH, old_KHE).astype(k_LKHE.dtype)
            if head_size < LANES:
                v_LK[layer] = placement.along_lanes(v_KWH, old_K).astype(v_LK.dtype)
            else:
                v_LK[layer] = placement.along_rows(v_KWH, old_K).astype(v_LK.dtype)
            for new_LK2W, scale_LK2E in zip(new[2:], scales_LK2E, strict=True):
                scale_LK2E[layer] = placement.of_scales(new_LK2W[layer], scale_LK2E[layer])

        jax.lax.fori_loop(0, layers, write_layer, None)
        _copy_all(pages, in_pools, copied)

    reach = jnp.where(added > 0, (start + added - 1) // E - first + 1, 0)
    jax.lax.fori_loop(0, jnp.minimum(reach, context_pages - first), write_page, None)


@dataclass(frozen=True)
class _Placement:
    """Where the tokens of a chunk go in one page: token w becomes entry offset + w, if it is one of the `added`.

    Products with a matrix of 0 and 1 move the tokens, and are exact.
    """

    tokens: int
    entries: int
    offset: Any  # negative if the chunk begins on an earlier page
    added: Any

    def along_lanes(self, new_KWH: Array, old_KHE: Array) -> Array:
        """The page [H, E] with the new tokens. A NaN would spread to all entries, so it takes a way of its own."""
        is_nan_KWE = self._matrix(1) & jnp.isnan(new_KWH[..., :1].astype(jnp.float32))
        nan_K1E = jnp.max(is_nan_KWE.astype(jnp.float32), axis=1, keepdims=True)
        placed_KHE = _product("KWH,WE->KHE", jnp.where(jnp.isnan(new_KWH), 0, new_KWH), self._matrix(1))
        return jnp.where(self._is_new(1), jnp.where(nan_K1E > 0, jnp.nan, placed_KHE), old_KHE)

    def along_rows(self, new_KWH: Array, old_KEH: Array) -> Array:
        """The page [E, H] with the new tokens, which are finite."""
        placed_KEH = _product("KWH,EW->KEH", new_KWH, self._matrix(0))
        return jnp.where(self._is_new(0), placed_KEH, old_KEH)

    def of_scales(self, new_K2W: Array, old_K2E: Array) -> Array:
        """As `along_lanes`; a NaN is that of a key alone."""
        is_nan_K2W = jnp.isnan(new_K2W)
        placed_K2E = _product("KXW,WE->KXE", jnp.where(is_nan_K2W, 0, new_K2W), self._matrix(1))
        nan_K2E = _product("KXW,WE->KXE", is_nan_K2W.astype(jnp.float32), self._matrix(1))
        return jnp.where(self._is_new(1), jnp.where(nan_K2E > 0, jnp.nan, placed_K2E), old_K2E)

    def _matrix(self, entry_axis: int) -> Array:
        """Which token goes to which entry: [W, E], or [E, W] if the entries are axis 0."""
        shape = (self.tokens, self.entries) if entry_axis == 1 else (self.entries, self.tokens)
        token = jax.lax.broadcasted_iota(jnp.int32, shape, 1 - entry_axis)
        entry = jax.lax.broadcasted_iota(jnp.int32, shape, entry_axis)
        return (entry == self.offset + token) & (token < self.added)

    def _is_new(self, entry_axis: int) -> Array:
        """Which entries get a token: [1, E], or [E, 1] if the entries are axis 0."""
        shape = (1, self.entries) if entry_axis == 1 else (self.entries, 1)
        token = jax.lax.broadcasted_iota(jnp.int32, shape, entry_axis) - self.offset
        return (token >= 0) & (token < self.added)


def _product(subscripts: str, new: Array, matrix: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if new.dtype == jnp.float32 else None
    return einsum_f32(subscripts, new, matrix.astype(new.dtype), precision=precision)


def _as_float(x: Array) -> Array:
    """int8 as bfloat16, in which its products with 0 and 1 are exact."""
    return x.astype(jnp.bfloat16) if x.dtype == jnp.int8 else x


def _copy_all(sources: Sequence[Any], targets: Sequence[Any], semaphores: Any) -> None:
    """Copies them at the same time, and waits for all."""
    copies = [
        pltpu.make_async_copy(source, target, semaphores.at[i])
        for i, (source, target) in enumerate(zip(sources, targets, strict=True))
    ]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()
