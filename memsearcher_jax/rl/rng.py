"""Random keys by name and step, so that a resumed run replays the draws of the run it continues."""

from __future__ import annotations

import zlib

import jax
import numpy as np


def named_key(seed: int, name: str, step: int) -> jax.Array:
    """The key of one use of randomness at one step."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode())), step)


def named_rng(seed: int, name: str, step: int) -> np.random.Generator:
    """The same for draws of the host."""
    return np.random.default_rng([seed, zlib.crc32(name.encode()), step])
