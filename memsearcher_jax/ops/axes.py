"""The one table from logical axes to mesh axes, and the functions that read it: sharding specs and collectives.

A program runs on a mesh in one of two modes. In the first the compiler partitions every operation, and only activations
are pinned (`constrain`). In the second, `shard_map_by_rows`, each device group runs the program on its own rows, holds
a shard of every weight and gathers the weight only while it is used (`all_gather_param`). Training uses the second
mode, because the compiler turns each gather of the first into a chain of collective permutes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, PartitionSpec

Axes = Sequence[str | None]
"""One logical axis per dimension of an array; None where a dimension has no name."""

MESH_AXES = ("data", "fsdp", "tensor")

LANES = 128
"""Columns of a tile of a TPU."""

MAX_PIECE_TILES = 64
"""A reduce-scatter works for pieces of this many tiles: 79 do, 397 are too many (libtpu 0.0.42)."""

AXIS_RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "draws": ("data", "fsdp", "tensor"),  # rows of logits, each with the whole vocabulary
    "lookup_batch": ("data",),  # rows while "fsdp" shards the columns of the embedding table
    "embed": ("fsdp",),
    "tokens": ("tensor",),  # of the residual stream between the blocks of a layer (Korthikanti et al. 2022)
    "heads": ("tensor",),
    "kv": ("tensor",),
    "ffn": ("tensor",),
    "vocab": ("tensor",),
    "head": (),
    "norm": (),
    "rank": (),
    "layers": (),
}


def partition_spec(axes: Axes, mesh_axes: Collection[str] = MESH_AXES) -> PartitionSpec:
    """The spec of an array with these logical axes, over these mesh axes only."""
    entries = list[tuple[str, ...] | None]()
    for axis in axes:
        names = tuple(name for name in AXIS_RULES[axis] if name in mesh_axes) if axis else ()
        entries.append(names or None)
    return PartitionSpec(*entries)


def platform() -> str:
    """tpu, gpu or cpu: that of the mesh of `jax.set_mesh`, whose devices need not be of this process; cpu without."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "cpu" if device is None else device.platform


def as_bits(x: Array) -> Array:
    """bfloat16 as integers of the same bits, to be cut into slices; x itself on accelerators and if of another type.

    XLA's CPU compiler moves bfloat16 as float32: to read one layer's weights or one page of a cache, it would convert
    all of them.
    """
    is_moved_as_float32 = x.dtype == jnp.bfloat16 and platform() == "cpu"
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if is_moved_as_float32 else x


def from_bits(x: Array) -> Array:
    """The inverse of `as_bits`."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def name_bits(x: Array, name: str) -> Array:
    """`checkpoint_name` without a derivative, for a value of which a scan stacks one per layer: these are `as_bits`."""
    return from_bits(checkpoint_name(as_bits(x), name))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def name_saved(x: Array, name: str) -> Array:
    """`name_bits` with the derivative of the identity."""
    return name_bits(x, name)


@name_saved.defjvp
def _name_saved_jvp(name: str, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # Not name_saved: a policy does not look into another custom_jvp.
    return name_bits(primals[0], name), tangents[0]


def row_major(x: Array) -> Array:
    """On TPUs, pins the layout of `x` and of its gradient to that whose last dimension is contiguous."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if platform() == "tpu" else x


def shard_count(axis: str) -> int:
    """Shards of a dimension with this logical axis on the mesh of `jax.set_mesh`."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[name] for name in AXIS_RULES[axis])


def constrain(x: Array, axes: Axes) -> Array:
    """Pins the sharding of an activation on the mesh of `jax.set_mesh`; without a mesh, `x` itself.

    Rows of activations use the "fsdp" devices ("batch"), so their embedding dimension is None. A dimension that its
    devices do not divide, such as a single row, is replicated.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not _auto_axes(mesh):
        return x
    return jax.lax.with_sharding_constraint(x, _dividing_spec(axes, x.shape, mesh))


def constrain_rows(tree: Any) -> Any:
    """Pins arrays [B, ...] by their rows; see `constrain`."""
    return jax.tree.map(lambda x: constrain(x, ("batch", *[None] * (x.ndim - 1))), tree)


def shard_map_per_device(function: Callable, in_axes: tuple, out_axes: Any, out_shape: Any = None) -> Callable:
    """`function`, run by each device on its shard of the arguments, for programs that the compiler cannot partition.

    `in_axes` is a pytree like the arguments. `out_axes` and `out_shape`, the global shape, are pytrees like the result;
    by default the result has the shape of the first argument. Without a mesh, `function` itself.
    """
    mesh = jax.sharding.get_abstract_mesh()
    names = set() if mesh.empty else _auto_axes(mesh)
    if not names:
        return function

    def dividing_specs(tree: Any, shapes: Any) -> Any:
        return jax.tree.map(lambda axes, shape: _dividing_spec(axes, shape, mesh), tree, shapes, is_leaf=_is_axes)

    def run(*arguments: Any) -> Any:
        shapes = jax.tree.map(jnp.shape, arguments)
        return jax.shard_map(
            function,
            in_specs=dividing_specs(in_axes, shapes),
            out_specs=dividing_specs(out_axes, shapes[0] if out_shape is None else out_shape),
            axis_names=names,
            check_vma=False,
        )(*arguments)

    return run


def shard_map_by_rows(function: Callable, in_axes: Any, out_axes: Any) -> Callable:
    """`function`, run by each device group that holds rows of the batch, on its shard of the arguments.

    `in_axes` and `out_axes` are pytrees as for `jax.shard_map`, with logical axes in place of specs. The compiler still
    partitions over the other mesh axes ("tensor"). A result without rows must be equal on all groups, which `psum_grad`
    and `pmax` ensure. Inside, weights are shards: use `all_gather_param`. Without a mesh, `function` itself.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function
    names = {name for name in mesh.axis_names if name in AXIS_RULES["batch"] or mesh.shape[name] == 1}

    def specs(tree: Any) -> Any:
        return jax.tree.map(lambda axes: partition_spec(axes, names), tree, is_leaf=_is_axes)

    return jax.shard_map(
        function, in_specs=specs(in_axes), out_specs=specs(out_axes), axis_names=names, check_vma=False
    )


def local_shape(shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
    """The shape of a weight here: that of a group's shard inside `shard_map_by_rows`, else the global shape."""
    mesh_sizes = _manual_axes()
    local = list(shape)
    for name, dimension in _sharded_dimensions(axes).items():
        local[dimension] //= mesh_sizes[name]
    return tuple(local)


def all_gather_param(weight: Array, axes: Axes) -> Array:
    """Inside `shard_map_by_rows` the whole weight, gathered from the shards of the groups; else the weight itself.

    In the backward pass the gradient is reduce-scattered: each group keeps the sum for its own shard only.
    """
    for name, dimension in _sharded_dimensions(axes).items():
        weight = _all_gather(weight, name, dimension, tuple(axes))
    return weight


def reshard(x: Array, have: Axes, want: Axes) -> Array:
    """The same array, sharded as `want` and no longer as `have`."""
    held = _sharded_dimensions(have)
    wanted = _sharded_dimensions(want)
    for name, dimension in held.items():
        if name not in wanted:
            x = jax.lax.all_gather(x, name, axis=dimension, tiled=True)
        elif wanted[name] != dimension:
            x = jax.lax.all_to_all(x, name, split_axis=wanted[name], concat_axis=dimension, tiled=True)
    return constrain(constrain(x, have), want)


def psum_grad(gradient: Array, axes: Axes) -> Array:
    """Inside `shard_map_by_rows` the gradient of a weight with these axes, summed over all groups; else itself.

    The backward pass of `all_gather_param` has summed over the groups among which the weight is sharded; this sums over
    the others.
    """
    names = tuple(name for name in _manual_axes() if name not in _sharded_dimensions(axes))
    return jax.lax.psum(gradient, names) if names else gradient


def pmax(x: Array) -> Array:
    """Inside `shard_map_by_rows` the maximum over all groups, else `x` itself."""
    names = tuple(_manual_axes())
    return jax.lax.pmax(x, names) if names else x


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _all_gather(shard: Array, name: str, dimension: int, axes: Axes) -> Array:
    """The shards of the mesh axis `name`, put together along `dimension`.

    Each device sends its part only. Left to itself, the compiler puts the parts along "tensor" together first, and
    every device sends all of them.
    """
    whole = _with_size(shard, dimension, shard.shape[dimension] * jax.lax.axis_size(name))
    gather = partial(jax.lax.all_gather, axis_name=name, axis=dimension, tiled=True)
    return shard_map_per_device(gather, (axes,), axes, whole)(shard)


def _all_gather_forward(shard: Array, name: str, dimension: int, axes: Axes) -> tuple[Array, None]:
    return _all_gather(shard, name, dimension, axes), None


def _all_gather_backward(name: str, dimension: int, axes: Axes, _: None, gradient: Array) -> tuple[Array]:
    scatter = partial(_reduce_scatter, name=name, dimension=dimension)
    own = _with_size(gradient, dimension, gradient.shape[dimension] // jax.lax.axis_size(name))
    return (shard_map_per_device(scatter, (axes,), axes, own)(gradient),)


_all_gather.defvjp(_all_gather_forward, _all_gather_backward)


def _with_size(x: Array, dimension: int, size: int) -> tuple[int, ...]:
    """The shape of `x` with another size of one dimension."""
    return (*x.shape[:dimension], size, *x.shape[dimension + 1 :])


def _reduce_scatter(gradient: Array, *, name: str, dimension: int) -> Array:
    """The sum over the devices of the mesh axis `name`: on each its own part along `dimension`."""
    # A TPU scatters a sum over the rows of its tiles. In another layout the compiler all-reduces the gradient, which is
    # twice the bytes, and slices the result.
    *slow, fast = (other for other in range(gradient.ndim) if other != dimension)
    size = gradient.shape[fast]
    if platform() == "tpu":
        padding = [(0, 0)] * gradient.ndim
        padding[fast] = (0, scatterable_size(size) - size)
        gradient = jnp.pad(gradient, padding)
    gradient = with_layout_constraint(gradient, Layout((*slow, dimension, fast)))
    for groups in _reduce_scatter_groups(jax.lax.axis_size(name)):
        gradient = jax.lax.psum_scatter(
            gradient, name, scatter_dimension=dimension, tiled=True, axis_index_groups=groups
        )
    if gradient.shape[fast] != size:
        # The compiler fails where it merges this slice into that of a sum which it could not scatter
        # (56 columns for each of 16 devices, libtpu 0.0.42).
        gradient = jax.lax.optimization_barrier(gradient)
    return jax.lax.slice_in_dim(gradient, 0, size, axis=fast)


def scatterable_size(size: int) -> int:
    """The next number of columns that the TPU compiler can cut into pieces for a reduce-scatter.

    It cuts whole tiles of 128 columns into equal pieces. For 151,936 columns, 1,187 tiles, it finds none and
    all-reduces; 1,188 tiles have many divisors.
    """
    tiles = -(-size // LANES)
    if _largest_prime_factor(tiles) <= MAX_PIECE_TILES:
        return size
    while _largest_prime_factor(tiles) > MAX_PIECE_TILES:
        tiles += 1
    return tiles * LANES


def _largest_prime_factor(number: int) -> int:
    factor = 2
    while factor * factor <= number:
        if number % factor:
            factor += 1
        else:
            number //= factor
    return number


def _reduce_scatter_groups(devices: int) -> list[list[list[int]] | None]:
    """The device groups of each step of a reduce-scatter: one step over all devices (None), or two of equal traffic.

    Over all of 4 x 4, 2 x 2 x 4, 8 x 8 or 4 x 4 x 4 chips at once the compiler would all-reduce instead; over the
    square root of their number it does not. 2 x 4 and 4 x 8 need no second step.
    """
    root = math.isqrt(devices)
    if devices < 16 or root * root != devices:
        return [None]
    far = [list(range(first, devices, root)) for first in range(root)]
    near = [list(range(first, first + root)) for first in range(0, devices, root)]
    return [far, near]


def _auto_axes(mesh: AbstractMesh) -> set[str]:
    """Mesh axes over which the compiler partitions here."""
    return set(mesh.axis_names) - set(mesh.manual_axes)


def _manual_axes() -> dict[str, int]:
    """Mesh axes that `shard_map_by_rows` maps here, with their sizes; axes of one device are left out."""
    mesh = jax.sharding.get_abstract_mesh()
    return {} if mesh.empty else {name: mesh.shape[name] for name in mesh.manual_axes if mesh.shape[name] > 1}


def _sharded_dimensions(axes: Axes) -> dict[str, int]:
    """Manual mesh axis -> the dimension of an array with these axes that it shards."""
    names = _manual_axes()
    dimensions = {}
    for dimension, axis in enumerate(axes):
        if axis is None:
            continue
        for name in AXIS_RULES[axis]:
            if name in names:
                dimensions[name] = dimension
    return dimensions


def _is_axes(tree: Any) -> bool:
    return isinstance(tree, tuple) and all(axis is None or isinstance(axis, str) for axis in tree)


def _dividing_spec(axes: Axes, shape: tuple[int, ...], mesh: AbstractMesh) -> PartitionSpec:
    """`partition_spec` over the compiler's mesh axes; dimensions that they do not divide are replicated."""
    names = _auto_axes(mesh)
    dividing = list[str | None]()
    for axis, size in zip(axes, shape, strict=True):
        mesh_axes = AXIS_RULES[axis] if axis else ()
        shards = math.prod(mesh.shape[name] for name in mesh_axes if name in names)
        dividing.append(axis if size % shards == 0 else None)
    return partition_spec(dividing, names)
