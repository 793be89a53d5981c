"""Meshes, and where every weight lies on them. The table itself, which the model reads too, is in `axes.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.stages import Lowered

from memsearcher_jax.model import qwen
from memsearcher_jax.model.axes import MESH_AXES, RULES, spec
from memsearcher_jax.model.axes import constrain as constrain  # the public door; `axes` only breaks an import cycle
from memsearcher_jax.model.config import MeshConfig, ModelConfig


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh ("data", "fsdp", "tensor") over all of `devices`, by default every device of every host.

    Devices are laid out by host, so that neighbours along "tensor", which talk the most, share one.
    Raises ValueError for sizes that do not use up the devices exactly.
    """
    devices = sorted(devices or jax.devices(), key=lambda device: (device.process_index, device.id))
    sizes = [getattr(config, axis) for axis in MESH_AXES]
    asked = " ".join(f"{axis}={size}" for axis, size in zip(MESH_AXES, sizes, strict=True))
    if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
        raise ValueError(f"mesh {asked}: every size must be 1 or more, with -1 (what the others leave) at most once")
    known = math.prod(size for size in sizes if size != -1)
    if len(devices) % known or (-1 not in sizes and len(devices) != known):
        raise ValueError(
            f"mesh {asked} does not fit {len(devices)} devices: "
            f"the sizes must multiply to {len(devices)}; -1 in one place takes what the others leave"
        )
    shape = [len(devices) // known if size == -1 else size for size in sizes]
    return Mesh(np.array(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(shape))


def named_sharding(mesh: Mesh, axes: Sequence[str | None]) -> NamedSharding:
    """Where an array with these logical axes lies; `named_sharding(mesh, ("batch", None))` is a batch of rows."""
    return NamedSharding(mesh, spec(axes))


def param_shardings(config: ModelConfig, mesh: Mesh) -> dict:
    """The tree of `qwen.init` with a sharding in place of each weight. Raises ValueError as `check_divides` does."""
    check_divides(config, dict(mesh.shape))
    return jax.tree.map(lambda weight: named_sharding(mesh, weight.axes), qwen.declared(config))


def check_divides(config: ModelConfig, mesh_shape: Mapping[str, int]) -> None:
    """Raises ValueError, in one line, for the first weight that the mesh cannot cut into equal parts."""
    for path, weight in jax.tree.leaves_with_path(qwen.declared(config)):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        for axis, size in zip(weight.axes, weight.shape, strict=True):
            parts = {mesh_axis: mesh_shape.get(mesh_axis, 1) for mesh_axis in RULES[axis]}
            if size % math.prod(parts.values()):
                mesh = " ".join(f"{mesh_axis}={count}" for mesh_axis, count in parts.items())
                raise ValueError(f"mesh {mesh} cannot split the {size} {axis} of {name}: choose a divisor of {size}")


def with_kernels(config: ModelConfig, mesh: Mesh) -> ModelConfig:
    """The config with the attention that the mesh's devices can run. Not the process's: a plan compiles for others."""
    if config.attention != "auto":
        return config
    return replace(config, attention="splash" if mesh.devices.flat[0].platform == "tpu" else "xla")


def reshard(params: dict, shardings: dict, dtype: str) -> dict:
    """A copy of `params` in `dtype`, laid out as `shardings` say, over the same devices: weights for the sampler."""
    return jax.jit(_cast, static_argnames="dtype", out_shardings=shardings)(params, dtype=dtype)


def publish(params: dict, config: ModelConfig, local: Mesh, dtype: str) -> dict:
    """A copy of `params` in `dtype` on this host's mesh `local`, from a mesh of all hosts: weights for its sampler.

    One jitted reshard gives every host a whole copy; all hosts must call it together, with meshes of one shape.
    """
    spread = reshard(params, copy_for_each_host(config, local, jax.devices()), dtype)

    def own_copy(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        shard = {shard.device: shard.data for shard in x.addressable_shards}
        return jax.make_array_from_single_device_arrays(
            x.shape, sharding, [shard[device] for device in local.devices.flat]
        )

    return jax.tree.map(own_copy, spread, param_shardings(config, local))


def copy_for_each_host(config: ModelConfig, local: Mesh, devices: Sequence[jax.Device]) -> dict:
    """Where the weights lie when each host has them as on its mesh, which for one of them is `local`."""
    devices = sorted(devices, key=lambda device: (device.process_index, device.id))
    names = ("host", *local.axis_names)
    everywhere = Mesh(
        np.array(devices).reshape(-1, *local.devices.shape), names, axis_types=(AxisType.Auto,) * len(names)
    )
    # The host's axis is in no weight's spec: each host has a copy, cut over its own devices.
    return jax.tree.map(lambda lies: NamedSharding(everywhere, lies.spec), param_shardings(config, local))


def lowered_publish(params: dict, shardings: dict, dtype: str) -> Lowered:
    """The program of `reshard`, of weights that need not be there."""
    return jax.jit(_cast, static_argnames="dtype", out_shardings=shardings).lower(params, dtype=dtype)


def _cast(params: dict, dtype: str) -> dict:
    return jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), params)
