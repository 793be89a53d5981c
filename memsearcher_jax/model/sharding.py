"""Meshes, the sharding of every weight on them, and copies of the weights for the sampler."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.stages import Wrapped

from memsearcher_jax.model import qwen
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.model.qwen import Params, ParamSpec
from memsearcher_jax.ops.attention import Visible
from memsearcher_jax.ops.axes import AXIS_RULES, MESH_AXES, Axes, partition_spec


class Device(Protocol):
    """A `jax.Device`, which type checkers do not know."""

    id: int
    platform: str
    process_index: int


def make_mesh(config: MeshConfig, devices: Sequence[Device] | None = None) -> Mesh:
    """A mesh ("data", "fsdp", "tensor") over all of `devices`, by default every device of every host.

    Devices are ordered by host, so that neighbours along "tensor", which communicate most, share one.
    Raises ValueError unless the sizes multiply to the number of devices.
    """
    devices = _by_host(devices or jax.devices())
    shape = tuple(config.shape(len(devices)).values())
    return Mesh(np.array(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(shape))


def named_sharding(mesh: Mesh, axes: Axes) -> NamedSharding:
    """The sharding of an array with these logical axes, such as ("batch", None) for rows of tokens."""
    return NamedSharding(mesh, partition_spec(axes))


def param_shardings(config: ModelConfig, mesh: Mesh) -> Params:
    """The tree of `qwen.init` with a sharding in place of each weight. Raises ValueError as `check_divides` does."""
    check_divides(config, dict(mesh.shape))
    return jax.tree.map(lambda weight: named_sharding(mesh, weight.axes), qwen.param_specs(config))


def abstract_params(config: ModelConfig, mesh: Mesh, dtype: str | None = None) -> Params:
    """The weights as shapes, types and shardings, to restore into or to compile for. `dtype`: default param_dtype."""
    return abstract_arrays(qwen.param_specs(config), mesh, dtype)


def abstract_arrays(specs: Params, mesh: Mesh, dtype: str | None = None) -> Params:
    """A tree of `ParamSpec` as shapes, types and shardings."""
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype or spec.dtype, sharding=named_sharding(mesh, spec.axes)),
        specs,
    )


def check_divides(config: ModelConfig, mesh_shape: Mapping[str, int]) -> None:
    """Raises ValueError, in one line, for the first weight that the mesh cannot split into equal shards."""
    for path, weight in jax.tree.leaves_with_path(qwen.param_specs(config)):
        for axis, size in zip(weight.axes, weight.shape, strict=True):
            shards = {mesh_axis: mesh_shape.get(mesh_axis, 1) for mesh_axis in AXIS_RULES[axis]}
            if size % math.prod(shards.values()):
                mesh = " ".join(f"{mesh_axis}={count}" for mesh_axis, count in shards.items())
                name = qwen.param_path(path)
                raise ValueError(f"mesh {mesh} cannot split the {size} {axis} of {name}: choose a divisor of {size}")


def select_attention(config: ModelConfig, mesh: Mesh, row_tokens: int) -> ModelConfig:
    """The config with attention "auto" resolved for the mesh's devices, which may differ from those of this process.

    Raises ValueError for kernels of other devices, and for rows or heads of a size that the kernels do not compute.
    """
    platform = mesh.devices.flat[0].platform
    of_platform = "splash" if platform == "tpu" else "xla"
    selected = of_platform if config.attention == "auto" else config.attention
    if selected not in ("xla", of_platform):
        raise ValueError(f"model.attention {selected} does not run on a {platform}: set it to auto")
    if kernel := qwen.PACKED_ATTENTION.get(selected):
        array: Any = jax.ShapeDtypeStruct
        heads = (config.heads, config.kv_heads, config.kv_heads)
        qkv = [array((1, n, row_tokens, config.head_size), config.compute_dtype) for n in heads]
        jax.eval_shape(kernel, *qkv, Visible(array((1, row_tokens), np.int32), array((1,), np.int32)))
    return replace(config, attention=selected)


def sampler_specs(config: ModelConfig, mesh: Mesh, dtype: str) -> Params:
    """`ParamSpec`s of the weights as a sampler on this mesh reads them, published in `dtype`."""
    return qwen.publish(qwen.param_specs(config), config, mesh.devices.flat[0].platform, dtype)


def publish(params: Params, config: ModelConfig, local: Mesh, dtype: str, *, owned: bool = False) -> Params:
    """A copy of `params`, which a mesh of all hosts shares, on this host's mesh `local`: for its sampler.

    `dtype`: see `qwen.publish`. `owned`: nobody else uses `params`, so they are copied only if the sampler reads them
    in another form. One jitted reshard, which all hosts must call together, with local meshes of one shape.
    """
    devices = tuple(jax.devices())
    if not (owned and is_in_sampler_form(params, config, local, devices, dtype)):
        params = publish_program(config, local, devices, dtype)(params)
    return on_submesh(params, local)


def is_in_sampler_form(
    params: Params, config: ModelConfig, local: Mesh, devices: tuple[Device, ...], dtype: str
) -> bool:
    """Whether `params`, which may be abstract, have the types and shardings of the result of `publish_program`."""
    mesh = _mesh_of_hosts(local, devices)
    specs = sampler_specs(config, local, dtype)
    if jax.tree.structure(params) != jax.tree.structure(specs):
        return False

    def is_same(array: Any, spec: ParamSpec) -> bool:
        shardings_agree = array.sharding.is_equivalent_to(named_sharding(mesh, spec.axes), len(spec.shape))
        return array.dtype == spec.dtype and shardings_agree

    return all(jax.tree.leaves(jax.tree.map(is_same, params, specs)))


@lru_cache(maxsize=8)
def publish_program(config: ModelConfig, local: Mesh, devices: tuple[Device, ...], dtype: str) -> Wrapped:
    """(params) -> one full copy of the weights per host, each laid out and sharded as on `local`."""
    mesh = _mesh_of_hosts(local, devices)
    shardings = jax.tree.map(lambda spec: named_sharding(mesh, spec.axes), sampler_specs(config, local, dtype))
    function = partial(
        _publish_one_after_another, config=config, mesh=mesh, platform=local.devices.flat[0].platform, dtype=dtype
    )
    return jax.jit(function, out_shardings=shardings)


def _mesh_of_hosts(local: Mesh, devices: Sequence[Device]) -> Mesh:
    """The meshes `local` of all hosts as one. No spec names its axis "host", over which the weights are replicated."""
    names = ("host", *local.axis_names)
    shape = (-1, *local.devices.shape)
    return Mesh(np.array(_by_host(devices)).reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def _publish_one_after_another(params: Params, config: ModelConfig, mesh: Mesh, platform: str, dtype: str) -> Params:
    """`qwen.publish` onto `mesh`, where a weight is gathered when the one before has its new sharding.

    Gathered together, those of 7B take 4.9 GB more of each chip of v5e 2x4.
    """
    publish_weight = partial(qwen.publish_weight, config=config, dtype=dtype)
    published = list[Any]()
    for weight, spec in zip(jax.tree.leaves(params), jax.tree.leaves(qwen.param_specs(config)), strict=True):
        if published:
            weight, published[-1] = jax.lax.optimization_barrier((weight, published[-1]))
        shardings = jax.tree.map(lambda spec: named_sharding(mesh, spec.axes), publish_weight(spec, spec))
        published.append(jax.lax.with_sharding_constraint(publish_weight(weight, spec), shardings))
    return qwen.unstack_layers(jax.tree.structure(params).unflatten(published), config, platform)


def on_submesh(params: Params, mesh: Mesh) -> Params:
    """The full copy of `params` that is on the devices of `mesh`, as arrays of that mesh; nothing is transferred."""

    def local_array(x: Array) -> Array:
        assert isinstance(x.sharding, NamedSharding)
        shards = {shard.device: shard.data for shard in x.addressable_shards}
        return jax.make_array_from_single_device_arrays(
            x.shape, NamedSharding(mesh, x.sharding.spec), [shards[device] for device in mesh.devices.flat]
        )

    return jax.tree.map(local_array, params)


def _by_host(devices: Sequence[Device]) -> list[Device]:
    return sorted(devices, key=lambda device: (device.process_index, device.id))


def cast_program(shardings: Params) -> Wrapped:
    """(params, dtype=...) -> a copy of the weights in that type, with these shardings over the same devices."""
    return jax.jit(_cast, static_argnames="dtype", out_shardings=shardings)


def _cast(params: Params, dtype: str) -> Params:
    return jax.tree.map(lambda x: x.astype(dtype), params)
