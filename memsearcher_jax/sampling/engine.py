"""The engine: continuous batching of contexts over the slots of one host.

One thread drives it. Requests accumulate between steps; all programs have fixed shapes and are compiled by `warm_up`.
The engine is a scheduler whose calls run on one executor, or, with `engine_per_replica`, on an executor for each
data-parallel replica. With one program for all replicas, every call takes as long as its busiest replica needs, and all
replicas are idle while the host handles finished generations. With an executor each, the others decode meanwhile, but
each compiles its own programs.
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
from memsearcher_jax.sampling.executor import Executor, replica_count
from memsearcher_jax.sampling.scheduler import FinishedGeneration, SamplerStats, ScheduledStep, Scheduler


class Engine(Scheduler):
    """S slots on the mesh of one host. What a context samples does not depend on its slot or replica."""

    def __init__(self, model: ModelConfig, settings: SamplingConfig, stop_ids: Sequence[int], mesh: Mesh):
        """`mesh` has local devices only: an engine never waits for another host. Raises ValueError as `Scheduler`."""
        replicas = replica_count(mesh)
        groups = replicas if settings.engine_per_replica else 1
        super().__init__(settings, replicas, groups)
        self._model = model
        self._meshes = [mesh]
        if settings.engine_per_replica:
            rows = mesh.devices.reshape(replicas, 1, 1, -1)
            self._meshes = [Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types) for devices in rows]
        settings = replace(settings, slots=settings.slots // groups, kv_tokens=settings.kv_tokens // groups)
        self._executors = [Executor(model, settings, tuple(stop_ids), mesh) for mesh in self._meshes]
        self._params: list[Params] = []  # for each executor
        self._root_key = jax.random.key(0)
        self._in_flight: deque[tuple[int, ScheduledStep, DecodeOutput | None]] = deque()

    def warm_up(self, params: Params) -> None:
        """Compiles every program that a step may need."""
        calls, decodes = self.warm_up_calls()
        for executor, local in zip(self._executors, self._local(params), strict=True):
            executor.allocate()
            executor.run(calls, local)
            for decode in decodes:
                executor.decode(decode, local, self._root_key)

    def start(self, params: Params, root_key: Array) -> None:
        """Sets new weights and a new root key, and empties all caches.

        `params` are on the engine's mesh, a copy for each replica. Raises RuntimeError if a slot holds a context.
        """
        if held := self.settings.slots - len(self.free_slots):
            raise RuntimeError(f"{held} slots still hold contexts of the previous weights")
        self.stop()
        for executor in self._executors:
            executor.allocate()
        self._params, self._root_key = self._local(params), root_key

    def stop(self) -> SamplerStats:
        """Frees every slot, drops requests, results and weights, and returns what was done since `start`."""
        self._in_flight.clear()
        self._params = []
        return super().stop()

    def release(self) -> None:
        """Stops, and gives the device memory of the cache back until the next `start`; nothing recompiles."""
        self.stop()
        for executor in self._executors:
            executor.release()

    def step(self) -> list[FinishedGeneration]:
        """Dispatches one step for each group with active slots, waits for the oldest, returns what it finished."""
        in_flight = {group for group, *_ in self._in_flight}
        for group, executor in enumerate(self._executors):
            if group not in in_flight and any(shard.active for shard in self._group(group)):
                step = self.schedule(group)
                executor.run(step.calls, self._params[group])
                output = executor.decode(step.decode, self._params[group], self._root_key) if step.decode else None
                self._in_flight.append((group, step, output))
        if not self._in_flight:
            return []
        _, step, output = self._in_flight.popleft()
        return self.update(step, jax.device_get(output))

    def _local(self, params: Params) -> list[Params]:
        """The weights on the mesh of each executor; nothing is transferred."""
        if len(self._meshes) == 1:
            return [params]
        return [on_submesh(params, self._model, mesh) for mesh in self._meshes]
