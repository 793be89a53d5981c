"""The one table from logical axes to mesh axes, and the constraint on activations that is read from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
from jax.sharding import AbstractMesh, PartitionSpec

Axes = Sequence[str | None]
"""One logical axis per dimension of an array; None where it has no name."""

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


def spec(axes: Axes) -> PartitionSpec:
    """Logical axes of one array -> how it lies on the mesh."""
    return PartitionSpec(*(RULES[axis] or None if axis else None for axis in axes))


def constrain(x: jax.Array, axes: Axes) -> jax.Array:
    """Pins an activation to the mesh of `jax.set_mesh`; without a mesh, `x` itself.

    The rows of an activation take the "fsdp" devices ("batch"), so its embedding dimension stays unnamed.
    A dimension that its devices do not divide, such as a single row, stays whole on each of them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, _fitting(axes, x.shape, mesh))


def per_device(
    function: Callable,
    in_axes: Sequence[Axes],
    out_axes: Axes | list[Axes],
    out_shape: tuple[int, ...] | list[tuple[int, ...]] | None = None,
) -> Callable:
    """`function`, run by each device on its own part of the arguments.

    `out_shape` is the whole result's, by default the first argument's; a list of axes and one of shapes for a function
    with several results. For what the compiler would not split by itself. Without a mesh, `function` itself.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function

    def split(*arguments: jax.Array):
        in_specs = tuple(_fitting(axes, x.shape, mesh) for axes, x in zip(in_axes, arguments, strict=True))
        if isinstance(out_axes, list):
            out_specs = tuple(_fitting(axes, shape, mesh) for axes, shape in zip(out_axes, out_shape, strict=True))
        else:
            out_specs = _fitting(out_axes, out_shape or arguments[0].shape, mesh)
        return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*arguments)

    return split


def _fitting(axes: Axes, shape: tuple[int, ...], mesh: AbstractMesh) -> PartitionSpec:
    """`spec`, without a name for the dimensions that do not divide."""
    parts = [math.prod(mesh.shape[name] for name in RULES[axis]) if axis else 1 for axis in axes]
    return spec([None if size % count else axis for axis, size, count in zip(axes, shape, parts, strict=True)])
