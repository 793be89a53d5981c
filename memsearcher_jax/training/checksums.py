"""32-bit checksums of arrays, which depend on every bit and its position, but not on the mesh or the number of hosts.

A checksum is the sum, modulo 2^32, of the MurmurHash3 finaliser (Appleby, public domain) of each entry's bits and
position. The finaliser is a bijection, so every change of a single entry changes the sum.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from memsearcher_jax.model.qwen import param_path


def checksums(tree: object) -> dict[str, int]:
    """The checksum of every array of numbers in a pytree, by path. Collective: all hosts of the arrays must call it."""
    sums = jax.device_get(_checksums(jax.tree.leaves(tree), np.uint32(0)))
    return dict(zip(tree_paths(tree), map(int, sums), strict=True))


def slice_checksum(x: np.ndarray, start: int) -> int:
    """The part of an array's checksum that comes from a slice, whose first entry has the flat index `start`."""
    return int(_checksums([x], np.uint32(start % 2**32))[0])


def tree_paths(tree: object) -> list[str]:
    """The path of each leaf, such as "layers.wq"."""
    return [param_path(path) for path, _ in jax.tree.leaves_with_path(tree)]


@jax.jit
def _checksums(arrays: list[jax.Array], start: jax.Array) -> list[jax.Array]:
    return [_checksum(x, start) for x in arrays]


def _checksum(x: jax.Array, index: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    for axis in range(x.ndim):
        stride = math.prod(x.shape[axis + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride)
    mixed = bits + index * jnp.uint32(0x9E3779B9)
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)
