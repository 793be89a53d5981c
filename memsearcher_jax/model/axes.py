"""The one table from logical axes to mesh axes, and what is read from it: how arrays lie, and how weights travel.

A program is split in one of two ways. Left to the compiler, which splits every operation by itself; only activations
are pinned (`constrain`). Or by rows (`by_rows`): each group of devices runs the program on rows of its own, holds its
part of every weight and fetches the rest for as long as it is used (`fetch`), which is how training runs. There the
compiler would make a chain of permutations of each fetch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

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
    if mesh.empty or not _left_to_compiler(mesh):
        return x
    return jax.lax.with_sharding_constraint(x, _fitting(axes, x.shape, mesh))


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
    if mesh.empty or not (names := _left_to_compiler(mesh)):
        return function

    def split(*arguments: jax.Array):
        in_specs = tuple(_fitting(axes, x.shape, mesh) for axes, x in zip(in_axes, arguments, strict=True))
        if isinstance(out_axes, list):
            out_specs = tuple(_fitting(axes, shape, mesh) for axes, shape in zip(out_axes, out_shape, strict=True))
        else:
            out_specs = _fitting(out_axes, out_shape or arguments[0].shape, mesh)
        run = jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False)
        return run(*arguments)

    return split


def by_rows(function: Callable, in_axes: Any, out_axes: Any) -> Callable:
    """`function`, run by each group of devices that has rows of its own, on its part of the arguments.

    `in_axes` and `out_axes`: pytrees as `jax.shard_map` takes them, with axes in place of specs. What several devices
    share beside the rows ("tensor") stays with the compiler. A result without rows must be the same for all groups,
    as `summed` and `most` make it. Without a mesh, `function` itself. Inside, weights are parts: `fetch` them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function
    names = {name for name in mesh.axis_names if name in RULES["batch"] or mesh.shape[name] == 1}

    def specs(tree: Any) -> Any:
        return jax.tree.map(partial(_spec_over, names), tree, is_leaf=_is_axes)

    return jax.shard_map(
        function, in_specs=specs(in_axes), out_specs=specs(out_axes), axis_names=names, check_vma=False
    )


def part_of(shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
    """The shape that a weight has here: within `by_rows` that of one group's part, else its own."""
    sizes, parts = _all_by_hand(), [1] * len(shape)
    for name, dimension in _cut_by_hand(axes).items():
        parts[dimension] *= sizes[name]
    return tuple(size // count for size, count in zip(shape, parts, strict=True))


def fetch(weight: jax.Array, axes: Axes) -> jax.Array:
    """Within `by_rows` the whole of a weight from the parts that the groups hold, else the weight itself.

    Going backward every group gets the sum of all groups' gradients of its own part, and keeps no other.
    """
    for name, dimension in _cut_by_hand(axes).items():
        weight = _gather(weight, name, dimension)
    return weight


def exchange(x: jax.Array, have: Axes, want: Axes) -> jax.Array:
    """The same array, cut along the dimensions of `want` and no longer along those of `have`."""
    held, wanted = _cut_by_hand(have), _cut_by_hand(want)
    for name, dimension in held.items():
        if name not in wanted:
            x = jax.lax.all_gather(x, name, axis=dimension, tiled=True)
        elif wanted[name] != dimension:
            x = jax.lax.all_to_all(x, name, split_axis=wanted[name], concat_axis=dimension, tiled=True)
    return constrain(constrain(x, have), want)


def summed(x: jax.Array, axes: Axes = ()) -> jax.Array:
    """Within `by_rows` the sum of all groups' values, else `x` itself.

    With the `axes` of a weight: of its gradient, which going back through `fetch` has summed over the groups that
    share the weight; the sum over the others.
    """
    names = tuple(name for name in _all_by_hand() if name not in _cut_by_hand(axes))
    return jax.lax.psum(x, names) if names else x


def most(x: jax.Array) -> jax.Array:
    """Within `by_rows` the largest of all groups' values, else `x` itself."""
    names = tuple(_all_by_hand())
    return jax.lax.pmax(x, names) if names else x


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(part: jax.Array, name: str, dimension: int) -> jax.Array:
    return jax.lax.all_gather(part, name, axis=dimension, tiled=True)


def _gather_forward(part: jax.Array, name: str, dimension: int) -> tuple[jax.Array, None]:
    return _gather(part, name, dimension), None


def _gather_backward(name: str, dimension: int, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    # A TPU scatters a sum over the rows of its tiles. Of one that lies otherwise, the compiler gives the whole to
    # everybody, which is twice the bytes, and cuts it then.
    *slow, fast = (other for other in range(gradient.ndim) if other != dimension)
    gradient = with_layout_constraint(gradient, Layout((*slow, dimension, fast)))
    for groups in _steps(jax.lax.axis_size(name)):
        gradient = jax.lax.psum_scatter(
            gradient, name, scatter_dimension=dimension, tiled=True, axis_index_groups=groups
        )
    return (gradient,)


_gather.defvjp(_gather_forward, _gather_backward)


def _steps(devices: int) -> list[list[list[int]] | None]:
    """Who adds up with whom to scatter a sum over all: in one step (None), or in two, which send as much together.

    Over all of 4 x 4, 2 x 2 x 4, 8 x 8 or 4 x 4 x 4 chips at once the compiler would again give everybody the whole;
    over the square root of their number it does not. 2 x 4 and 4 x 8 need no second step.
    """
    root = math.isqrt(devices)
    if devices < 16 or root * root != devices:
        return [None]
    far = [[near + root * step for step in range(root)] for near in range(root)]
    return [far, [list(range(first, first + root)) for first in range(0, devices, root)]]


def _left_to_compiler(mesh: AbstractMesh) -> set[str]:
    """Mesh axes that are not split by hand where this is called."""
    return {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}


def _all_by_hand() -> dict[str, int]:
    """Mesh axes that are, with their sizes; not those of one device, over which nothing is to be done."""
    mesh = jax.sharding.get_abstract_mesh()
    return {} if mesh.empty else {name: mesh.shape[name] for name in mesh.manual_axes if mesh.shape[name] > 1}


def _cut_by_hand(axes: Axes) -> dict[str, int]:
    """Of those, the ones that cut an array with these axes, and the dimension that each cuts."""
    names = _all_by_hand()
    return {name: dimension for dimension, axis in enumerate(axes) if axis for name in RULES[axis] if name in names}


def _spec_over(names: set[str], axes: Axes) -> PartitionSpec:
    """`spec`, of these mesh axes alone."""
    kept = [tuple(name for name in RULES[axis] if name in names) if axis else () for axis in axes]
    return PartitionSpec(*(entry or None for entry in kept))


def _is_axes(tree: Any) -> bool:
    return isinstance(tree, tuple) and all(axis is None or isinstance(axis, str) for axis in tree)


def _fitting(axes: Axes, shape: tuple[int, ...], mesh: AbstractMesh) -> PartitionSpec:
    """`spec` for what is left to the compiler, without a name for the dimensions that do not divide."""
    names = _left_to_compiler(mesh)
    parts = [math.prod(mesh.shape[name] for name in RULES[axis] if name in names) if axis else 1 for axis in axes]
    return _spec_over(
        names, [None if size % count else axis for axis, size, count in zip(axes, shape, parts, strict=True)]
    )
