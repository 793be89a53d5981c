"""The two meshes of a run: one for training, over all devices, and one for sampling, over the devices of a host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import Mesh

from memsearcher_jax.config import RunConfig
from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.model.sharding import Device


@dataclass(frozen=True)
class Meshes:
    """The mesh of training, and that of the sampler on this host."""

    train: Mesh
    local: Mesh


def make_meshes(config: RunConfig, devices: Sequence[Device], local_devices: Sequence[Device]) -> Meshes:
    """Both meshes over these devices. Raises ValueError if the devices, the weights or the slots do not divide."""
    check_slices(config.mesh, devices)
    train = sharding.make_mesh(config.mesh, devices)
    sharding.check_divides(config.model, dict(train.shape))
    tensor = config.sampling.tensor
    slots = config.sampling.slots
    if len(local_devices) % tensor:
        raise ValueError(
            f"sampling.tensor {tensor} does not divide the {len(local_devices)} devices of a host: "
            f"set it to {math.gcd(tensor, len(local_devices))} (plan_tpu.py --suggest chooses it)"
        )
    local = sharding.make_mesh(MeshConfig(data=-1, fsdp=1, tensor=tensor), local_devices)
    sharding.check_divides(config.model, dict(local.shape))
    replicas = local.shape["data"]
    if slots % replicas:
        raise ValueError(
            f"sampling.slots {slots} does not divide over the {replicas} samplers of a host: "
            f"choose a multiple of {replicas}"
        )
    return Meshes(train, local)


def check_slices(mesh: MeshConfig, devices: Sequence[Device]) -> None:
    """Raises ValueError where an axis besides "data" would cross the network between TPU slices.

    Weights that slices share would cross it in every micro-batch, and XLA (libtpu 0.0.42) does not compile that for
    Qwen's vocabulary.
    """
    # Devices of a single slice may have no slice_index; that of GPUs counts hosts.
    slices = len({getattr(device, "slice_index", 0) for device in devices if device.platform == "tpu"})
    data = mesh.shape(len(devices))["data"]
    if slices > 1 and data % slices:
        raise ValueError(
            f"mesh.data {data} is no multiple of the {slices} slices, so that they would share weights over the "
            f"data-centre network: set --mesh.data {slices}"
        )
