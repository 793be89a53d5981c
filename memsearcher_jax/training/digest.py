"""Digests of arrays: 64 bits for each, of every bit and its place, the same on any mesh and any number of hosts.

Sums modulo 2^32 do not depend on the order of their terms. The first multiplies the bits of each entry by an odd number
of its place, so that no single change can leave it as it was; the second mixes both by the finaliser of MurmurHash3
(Appleby, public domain). For finding damage, not for keeping anybody out.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PIECE = 1 << 20  # entries that a host works on at one time


def digests(tree: Any) -> dict[str, str]:
    """The digest of every array of numbers in a pytree, by its path. All hosts that share the arrays must call it."""
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(tree)]
    return dict(zip(paths, [written(*pair) for pair in jax.device_get(_all_sums(jax.tree.leaves(tree)))], strict=True))


def written(first: int, second: int) -> str:
    """Two sums as a digest."""
    return f"{int(first):08x}{int(second):08x}"


def host_sums(x: np.ndarray, start: int) -> tuple[int, int]:
    """The two sums over a part of an array that holds its entries from number `start` on; parts' sums add up."""
    bits, totals = np.ascontiguousarray(x).reshape(-1).view(f"u{x.dtype.itemsize}"), [0, 0]
    for offset in range(0, len(bits), PIECE):
        piece = bits[offset : offset + PIECE].astype(np.uint32)
        places = (np.arange(len(piece), dtype=np.uint64) + np.uint64(start + offset)).astype(np.uint32)
        for number, terms in enumerate(_terms(piece, places)):
            totals[number] = (totals[number] + int(terms.sum(dtype=np.uint64))) % 2**32
    return totals[0], totals[1]


@jax.jit
def _all_sums(arrays: list[jax.Array]) -> list[jax.Array]:
    return [_sums(x) for x in arrays]


def _sums(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    places = jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        stride = math.prod(x.shape[axis + 1 :]) % 2**32
        places += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride)
    return jnp.stack([jnp.sum(terms, dtype=jnp.uint32) for terms in _terms(bits, places)])


def _terms(bits, places):
    """What is summed, for numpy and for JAX alike; uint32 throughout, which wraps."""
    mixed = bits + places * np.uint32(0x9E3779B9)
    mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return bits * (places * np.uint32(2) + np.uint32(1)), mixed ^ (mixed >> np.uint32(16))
