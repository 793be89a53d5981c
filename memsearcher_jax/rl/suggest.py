"""Which mesh, remat policy and rows per device suit a slice: what may be chosen, and in which order to try it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from memsearcher_jax.config import RunConfig
from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.rl import roofline
from memsearcher_jax.rl.roofline import Load, Slice

REMAT = ("none", "projections", "attention", "full")  # from what keeps most to what keeps least
COPIES, TOGETHER, ROWS = (1, 2, 4), (1, 2, 4), (1, 2, 4)


@dataclass(frozen=True)
class Choice:
    """One way to train on a slice."""

    mesh: MeshConfig
    remat: str
    rows: int  # of a micro-batch, for each group of devices that has rows of its own
    seconds: float  # of a step's reference and update, at the roofline

    def applied(self, config: RunConfig) -> RunConfig:
        """The config with this choice."""
        parts = self.mesh.data * self.mesh.fsdp
        accumulate = config.training.rows_per_update // (parts * self.rows)
        return replace(
            config,
            mesh=self.mesh,
            model=replace(config.model, remat=self.remat),
            training=replace(config.training, accumulate=accumulate),
        )

    def needs_more_than(self, other: Choice) -> bool:
        """Whether it surely takes at least as much memory: the same mesh, as many rows, and as much kept of them."""
        return (
            self.mesh == other.mesh and self.rows >= other.rows and REMAT.index(self.remat) <= REMAT.index(other.remat)
        )

    def __str__(self) -> str:
        mesh = self.mesh
        return f"mesh {mesh.data} x {mesh.fsdp} x {mesh.tensor}, remat {self.remat}, rows per device {self.rows}"


def choices(config: RunConfig, load: Load, where: Slice) -> list[Choice]:
    """All that divides, the quickest at the roofline first; of those as quick, what needs least memory."""
    found = []
    for mesh in _meshes(config, where.devices):
        for rows in ROWS:
            if config.training.rows_per_update % (mesh.data * mesh.fsdp * rows):
                continue
            for remat in REMAT:
                choice = Choice(mesh, remat, rows, 0.0)
                found.append(replace(choice, seconds=_seconds(choice.applied(config), load, where)))
    return sorted(found, key=lambda one: (round(one.seconds, 3), one.rows, -REMAT.index(one.remat), one.mesh.data))


def row_bytes(config: RunConfig) -> int:
    """What the backward pass keeps at least of a row: the input of every layer."""
    itemsize = 2 if config.model.compute_dtype == "bfloat16" else 4
    return config.model.layers * config.training.row_tokens * config.model.embed_size * itemsize


def _meshes(config: RunConfig, devices: int) -> Iterator[MeshConfig]:
    for data in COPIES:
        for tensor in TOGETHER:
            if devices % (data * tensor):
                continue
            mesh = MeshConfig(data, devices // (data * tensor), tensor)
            try:
                sharding.check_divides(config.model, vars(mesh))
            except ValueError:
                continue
            yield mesh


def _seconds(config: RunConfig, load: Load, where: Slice) -> float:
    """At the roofline, with collectives as they are by formula."""
    model, mesh = config.model, config.mesh
    weights = roofline.weight_bytes(model) / mesh.tensor
    fetch = weights * (mesh.fsdp - 1) / mesh.fsdp
    rows = config.training.rows_per_update // config.training.accumulate // (mesh.data * mesh.fsdp)
    # Two sums of activations in each layer, forward and backward.
    summed = 2 * 2 * (mesh.tensor - 1) / mesh.tensor * row_bytes(config) * rows
    passes = 2 if model.remat == "none" else 3
    # Weights come forward, and again for what is computed again; gradients go back.
    sent = {"update": passes * (fetch + summed), "reference": fetch + summed}
    sent["update"] += 0.0 if mesh.data == 1 else 2 * 2 * weights / mesh.fsdp
    phases = roofline.training_phases(config, load, where, tensor=mesh.tensor, sent=sent)
    return math.fsum(phase.seconds for phase in phases)
