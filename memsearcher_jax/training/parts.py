"""A batch of rows in micro-batches: cutting it, putting it together, and going through those that hold anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from memsearcher_jax.model.axes import most


def split_rows(batch: Any, parts: int) -> Any:
    """A pytree of [B, ...] as [parts, B / parts, ...]: part i holds rows i, i + parts, i + 2 parts, ...

    Strided, because each device holds a run of neighbouring rows: every part then has some from every device and
    nothing moves between them.
    """
    return jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)


def merge_rows(parts: Any) -> Any:
    """Undoes `split_rows`."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), parts)


def filled_parts(segment_nBT: jax.Array) -> jax.Array | int:
    """The number of leading parts behind which no part holds a token, on any device.

    Of a single part 1, whatever it holds.
    """
    parts = len(segment_nBT)
    if parts == 1:
        return 1
    return most(jnp.max(jnp.where(jnp.any(segment_nBT > 0, axis=(1, 2)), jnp.arange(1, parts + 1), 0)))


def scan_leading(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, parts: Any, count: jax.Array | int):
    """`jax.lax.scan` over the first `count` parts; for the others nothing runs, and what comes out is 0.

    `count` may be traced: one program serves batches that are more or less full. Not to be differentiated through.
    """
    first = jax.tree.map(lambda x: x[0], parts)
    _, one = jax.eval_shape(step, carry, first)
    out = jax.tree.map(lambda x: jnp.zeros((len(jax.tree.leaves(parts)[0]), *x.shape), x.dtype), one)

    def body(index: jax.Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, out = state
        part = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), parts)
        carry, new = step(carry, part)
        return carry, jax.tree.map(lambda all, x: jax.lax.dynamic_update_index_in_dim(all, x, index, 0), out, new)

    return jax.lax.fori_loop(0, count, body, (carry, out))
