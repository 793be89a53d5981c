"""Symmetric int8: numbers along some axes as integers from -127 to 127 times one float32 factor, the scale."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array


def quantize(x: Array, axes: Sequence[int]) -> tuple[Array, Array]:
    """(int8 values, float32 scale without `axes`): x is about values * scale, rounded to the nearest.

    Where all numbers are 0, so is the scale; where one is not finite, the scale is NaN.
    """
    values, scale = _scaled(x, axes)
    return values.astype(jnp.int8), jnp.squeeze(scale, tuple(axes))


def rounded(x: Array) -> Array:
    """x as `quantize` along the last axis stores it, in its own type; to store that again loses nothing more."""
    values, scale = _scaled(x, (-1,))
    return (values * scale).astype(x.dtype)


def _scaled(x: Array, axes: Sequence[int]) -> tuple[Array, Array]:
    axes = tuple(axes)
    wide = x.astype(jnp.float32)
    # A sum is NaN where a number is not finite; a CPU's maximum may ignore NaN.
    nan = 0 * jnp.sum(wide, axis=axes, keepdims=True)
    scale = jnp.max(jnp.abs(wide), axis=axes, keepdims=True) / 127 + nan
    return jnp.round(wide / jnp.where(scale == 0, 1, scale)), scale
