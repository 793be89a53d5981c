"""Splits a batch into micro-batches for gradient accumulation and loops over those that hold tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from memsearcher_jax.ops.axes import pmax

Tree = TypeVar("Tree")
Carry = TypeVar("Carry")
Output = TypeVar("Output")


def split(batch: Tree, count: int) -> Tree:
    """A pytree of [B, ...] as [count, B / count, ...]: micro-batch i holds rows i, i + count, i + 2 count, ...

    The split is strided because each device holds consecutive rows: every micro-batch then has rows of every device,
    and no row moves between devices.
    """
    return jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), batch)


def merge(microbatches: Tree) -> Tree:
    """The inverse of `split`."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), microbatches)


def num_nonempty(segment_nBT: jax.Array) -> jax.Array | int:
    """1 + the index of the last micro-batch with a token on any device; a single micro-batch always counts as 1."""
    count = len(segment_nBT)
    if count == 1:
        return 1
    return pmax(jnp.max(jnp.where(jnp.any(segment_nBT > 0, axis=(1, 2)), jnp.arange(1, count + 1), 0)))


def scan_first(
    body: Callable[[Carry, Tree], tuple[Carry, Output]], init: Carry, xs: Tree, ys: Output, count: jax.Array | int
) -> tuple[Carry, Output]:
    """`jax.lax.scan` over the first `count` entries of `xs`; their outputs replace the first `count` entries of `ys`.

    `count` may be traced, so that one program serves batches that are more or less full. Not differentiable.
    """

    def step(index: jax.Array, state: tuple[Carry, Output]) -> tuple[Carry, Output]:
        carry, ys = state
        carry, y = body(carry, jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), xs))
        return carry, jax.tree.map(lambda all_y, y: jax.lax.dynamic_update_index_in_dim(all_y, y, index, 0), ys, y)

    return jax.lax.fori_loop(0, count, step, (init, ys))
