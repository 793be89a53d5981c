"""The KV cache: an argument and a result of `qwen.forward`, never hidden state."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from memsearcher_jax.model.axes import constrain
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
        # Mapped over the leading axes in their order: mapping over the rows alone would transpose the whole cache.
        write = jax.vmap(jax.vmap(_write_row), in_axes=(0, 0, None, None))
        return Cache(
            k_LBKCH=constrain(write(self.k_LBKCH, k_LBKTH, self.length_B, added_B), CACHE_AXES),
            v_LBKCH=constrain(write(self.v_LBKCH, v_LBKTH, self.length_B, added_B), CACHE_AXES),
            length_B=self.length_B + added_B,
        )


def _write_row(old_KCH: jax.Array, new_KTH: jax.Array, length: jax.Array, added: jax.Array) -> jax.Array:
    """One row of one layer with tokens 0 .. added - 1 of the block at length, length + 1, ...; all else as it was.

    The write is one window of fixed width. Near the end the window starts before `length`, because a slice that runs
    past the end would be moved back whole; so each of its entries picks its token, or what stands there already.
    """
    width = new_KTH.shape[1]
    start = jnp.minimum(length, old_KCH.shape[1] - width)
    token_T = start + jnp.arange(width) - length
    is_new_T1 = ((token_T >= 0) & (token_T < added))[:, None]
    new_KTH = jnp.take(new_KTH, token_T, axis=1, mode="clip").astype(old_KCH.dtype)
    standing_KTH = jax.lax.dynamic_slice_in_dim(old_KCH, start, width, axis=1)
    return jax.lax.dynamic_update_slice_in_dim(old_KCH, jnp.where(is_new_T1, new_KTH, standing_KTH), start, axis=1)
