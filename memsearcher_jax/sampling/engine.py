"""The engine: continuous batching of contexts over the slots of one host.

One thread drives it. Requests go to `engine.scheduler` and accumulate between steps; a step runs what the scheduler
plans on a model runner. All programs have fixed shapes and are compiled by `warm_up`. With one runner for all
data-parallel replicas, every call takes as long as its busiest replica needs, and all are idle while the host handles
finished generations. With one for each (`engine_per_replica`) the others decode meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import jax
from jax import Array
from jax.sharding import Mesh

from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.qwen import Params
from memsearcher_jax.model.sharding import on_submesh
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.sampling.decode import DecodeOutput
from memsearcher_jax.sampling.model_runner import ModelRunner, replica_count
from memsearcher_jax.sampling.scheduler import FinishedGeneration, SamplerStats, ScheduledStep, Scheduler


class Engine:
    """S slots on the mesh of one host.

    In float32 (`model.compute_dtype`) what a context samples does not depend on its slot, its replica or the contexts
    in other slots. In bfloat16 it does where rounding decides between tokens, see `decode`.
    """

    def __init__(self, model: ModelConfig, settings: SamplingConfig, stop_ids: Sequence[int], mesh: Mesh):
        """`mesh` has local devices only: an engine never waits for another host. Raises ValueError as `Scheduler`."""
        replicas = replica_count(mesh)
        self._meshes = [mesh]
        if settings.engine_per_replica:
            rows = mesh.devices.reshape(replicas, 1, 1, -1)
            self._meshes = [Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types) for devices in rows]
        groups = len(self._meshes)
        self.scheduler = Scheduler(settings, replicas, groups)
        settings = replace(settings, slots=settings.slots // groups, kv_tokens=settings.kv_tokens // groups)
        self._runners = [ModelRunner(model, settings, tuple(stop_ids), mesh) for mesh in self._meshes]
        self._weights: list[tuple[Params, Array]] = []  # of each group, with the root key; none while it is stopped
        self._in_flight: deque[tuple[int, ScheduledStep, DecodeOutput | None]] = deque()  # of each group at most one

    def warm_up(self, params: Params) -> None:
        """Compiles every program that a step may need."""
        for runner, weights in zip(self._runners, self._place(params, jax.random.key(0)), strict=True):
            for step in self.scheduler.warm_up_steps():
                runner.run(step, *weights)

    def start(self, params: Params, root_key: Array) -> None:
        """Sets new weights and a new root key, and empties all caches.

        `params` are on the engine's mesh, a copy for each replica. Raises RuntimeError if a slot holds a context.
        """
        if held := self.scheduler.settings.slots - len(self.scheduler.free_slots):
            raise RuntimeError(f"{held} slots still hold contexts of the previous weights")
        self.stop()
        self._weights = self._place(params, root_key)

    def stop(self) -> SamplerStats:
        """Frees every slot, drops requests, results and weights, and returns what was done since `start`."""
        self._in_flight.clear()
        self._weights = []
        return self.scheduler.clear()

    def release(self) -> None:
        """Stops, and gives the device memory of the cache back until the next `start`; nothing recompiles."""
        self.stop()
        for runner in self._runners:
            runner.release()

    def step(self) -> list[FinishedGeneration]:
        """Dispatches one step for each group with active slots, waits for the oldest, returns what it finished."""
        in_flight = {group for group, *_ in self._in_flight}
        for group, runner in enumerate(self._runners):
            if group not in in_flight and self.scheduler.is_active(group):
                step = self.scheduler.schedule(group)
                self._in_flight.append((group, step, runner.run(step, *self._weights[group])))
        if not self._in_flight:
            return []
        _, step, output = self._in_flight.popleft()
        return self.scheduler.update(step, jax.device_get(output))

    def _place(self, params: Params, root_key: Array) -> list[tuple[Params, Array]]:
        if len(self._meshes) == 1:
            return [(params, root_key)]
        return [(on_submesh(params, mesh), root_key) for mesh in self._meshes]
