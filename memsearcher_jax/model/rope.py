"""Rotary positions."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from memsearcher_jax.model.config import NO_SCALING, RopeScaling


def rope_rotation(
    position_BT: Array, head_size: int, theta: float, scaling: RopeScaling = NO_SCALING
) -> tuple[Array, Array]:
    """(cos_BTh, sin_BTh), float32, of the angles position * theta^(-2 i / H) of the h = H / 2 pairs of a head.

    Su et al. 2021, eq. 15.
    """
    frequency_h = theta ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    if scaling.factor != 1:
        low = scaling.low_frequency_factor
        high = scaling.high_frequency_factor
        periods_h = scaling.original_positions * frequency_h / (2 * jnp.pi)
        kept_h = jnp.clip((periods_h - low) / (high - low), 0, 1)
        frequency_h *= kept_h + (1 - kept_h) / scaling.factor
    angle_BTh = position_BT[..., None].astype(jnp.float32) * frequency_h
    return jnp.cos(angle_BTh), jnp.sin(angle_BTh)


def apply_rope(x_BNTH: Array, rotation: tuple[Array, Array]) -> Array:
    """Rotates each pair (i, i + H / 2) of a head by its angle: Qwen pairs the two halves, not neighbours."""
    cos_BTh, sin_BTh = rotation
    cos_B1Th = cos_BTh[:, None]
    sin_B1Th = sin_BTh[:, None]
    low_BNTh, high_BNTh = jnp.split(x_BNTH.astype(jnp.float32), 2, axis=-1)
    rotated = (low_BNTh * cos_B1Th - high_BNTh * sin_B1Th, high_BNTh * cos_B1Th + low_BNTh * sin_B1Th)
    return jnp.concatenate(rotated, axis=-1).astype(x_BNTH.dtype)
