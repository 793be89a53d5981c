"""The KV cache: an argument and a result of `qwen.forward`, never hidden state."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from memsearcher_jax.model.axes import constrain, per_device
from memsearcher_jax.model.config import ModelConfig

CACHE_AXES = ("layers", "batch", "kv", None, None)
"""Logical axes of k_LBKCH and v_LBKCH; `length_B` has ("batch",)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of B rows with capacity C: entry j of a row belongs to the token at position j."""

    k_LBKCH: jax.Array  # in compute_dtype, already rotated; entries from length_B on mean nothing
    v_LBKCH: jax.Array  # in compute_dtype
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

    def append(self, k_LBKTH: jax.Array, v_LBKTH: jax.Array, segment_BT: jax.Array) -> Cache:
        """Each row with its real tokens (segment 1, before any padding) written behind what it holds.

        Tokens past the capacity are dropped, but `length_B` counts them: a row that overflowed shows it.
        Raises ValueError for a block wider than the cache.
        """
        width, capacity = k_LBKTH.shape[3], self.k_LBKCH.shape[3]
        if width > capacity:
            raise ValueError(f"a block of {width} tokens cannot be written to a cache of {capacity}: split the block")
        added_B = jnp.sum(segment_BT > 0, axis=1, dtype=jnp.int32)
        write = per_device(_write, (CACHE_AXES, CACHE_AXES, ("batch",), ("batch",)), CACHE_AXES)
        return Cache(
            k_LBKCH=constrain(write(self.k_LBKCH, k_LBKTH, self.length_B, added_B), CACHE_AXES),
            v_LBKCH=constrain(write(self.v_LBKCH, v_LBKTH, self.length_B, added_B), CACHE_AXES),
            length_B=self.length_B + added_B,
        )


def _write(old_LBKCH: jax.Array, new_LBKTH: jax.Array, length_B: jax.Array, added_B: jax.Array) -> jax.Array:
    """The cache with tokens 0 .. added - 1 of each row at length, length + 1, ...; all else as it was.

    A loop of slice updates, because it is what every compiler does in place: for a scatter, TPU and CPU turn the whole
    cache into another layout and back. A row's write is one window of fixed width. Near the end the window starts
    before `length`, since a slice that runs past the end would be moved back whole; so each of its entries picks its
    token, or what stands there already.
    """
    width, capacity = new_LBKTH.shape[3], old_LBKCH.shape[3]

    def write_row(row: jax.Array, cache_LBKCH: jax.Array) -> jax.Array:
        start = jnp.minimum(length_B[row], capacity - width)
        token_T = start + jnp.arange(width) - length_B[row]
        is_new_T1 = ((token_T >= 0) & (token_T < added_B[row]))[:, None]
        row_L1KTH = jax.lax.dynamic_slice_in_dim(new_LBKTH, row, 1, axis=1).astype(cache_LBKCH.dtype)
        new_L1KTH = jnp.take(row_L1KTH, token_T, axis=3, mode="clip")
        window = (0, row, 0, start, 0)
        standing_L1KTH = jax.lax.dynamic_slice(cache_LBKCH, window, new_L1KTH.shape)
        return jax.lax.dynamic_update_slice(cache_LBKCH, jnp.where(is_new_T1, new_L1KTH, standing_L1KTH), window)

    return jax.lax.fori_loop(0, old_LBKCH.shape[1], write_row, old_LBKCH)
