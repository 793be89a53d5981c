"""The one table from logical axes to mesh axes, and the constraint on activations that is read from it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")

RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "lookup_batch": ("data",),  # rows while "fsdp" holds the columns of the embedding table
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv": ("tensor",),
    "ffn": ("tensor",),
    "vocab": ("tensor",),
    "head": (),
    "norm": (),
    "layers": (),
}


def spec(axes: Sequence[str | None]) -> PartitionSpec:
    """Logical axes of one array, None where a dimension has no name -> how it lies on the mesh."""
    return PartitionSpec(*(RULES[axis] or None if axis else None for axis in axes))


def constrain(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """Pins an activation to the mesh of `jax.set_mesh`; without a mesh, `x` itself.

    The rows of an activation take the "fsdp" devices ("batch"), so its embedding dimension stays unnamed.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes))
