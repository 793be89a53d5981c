"""The engine: continuous batching of contexts over the slots of one host.

One thread drives it. Requests go to `engine.scheduler` and accumulate between steps; a step runs what the scheduler
plans on a model runner. All programs have fixed shapes and are compiled by `warm_up`. With one runner for all
data-parallel replicas, every call takes as long as its busiest replica needs; with one for each (`engine_per_replica`)
no replica waits for another.

With `async_scheduling` two calls are in flight: the second one takes the last tokens from the devices' own output of
the first one, so that the devices work while the host reads this output and handles what has ended.

    devices   | call 1   | call 2   | call 3   |
    host      |   reads 1 ^, handles it, dispatches call 3 before call 2 ends
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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

LATE_FACTOR = 0.8
"""By which a host that was late expects calls to be shorter."""


@dataclass
class _Call:
    """A step that was dispatched."""

    step: ScheduledStep
    output: DecodeOutput | None
    dispatched_at: float  # of time.monotonic


@dataclass
class _Group:
    """Replicas whose calls are dispatched together, and what they do."""

    number: int
    mesh: Mesh
    runner: ModelRunner
    weights: tuple[Params, Array] | None = None  # with the root key; None while the engine is stopped
    calls: deque[_Call] = field(default_factory=deque)  # in flight
    ended_at: float = 0.0  # when the last call ended whose output was read
    has_work: bool = False  # whether generations went on then
    call_seconds: float = 0.0  # of the last call that the host waited for
    sure_seconds: float = 0.0  # that the next calls are likely to take at least
    host_wait: float = 0.0  # since `start`

    def is_idle(self) -> bool:
        """Whether the devices have finished all that was dispatched."""
        if not self.calls:
            return True
        output = self.calls[-1].output
        return output is not None and self.runner.is_done(output)

    def expected_end(self, call_seconds: float) -> float:
        """When the calls in flight have ended if each takes so long."""
        end = self.ended_at
        for call in self.calls:
            end = max(end, call.dispatched_at) + call_seconds
        return end

    def record_end(self, call: _Call, is_late: bool, now: float) -> None:
        """The output of the oldest call was read. `is_late`: it was there before the host asked for it."""
        began = max(self.ended_at, call.dispatched_at)
        if is_late:
            # How long it took is not known. A host that trusts too long a time would be late for every call.
            self.sure_seconds = LATE_FACTOR * min(self.sure_seconds, now - began)
            self.ended_at = min(now, began + self.call_seconds)
        else:
            self.call_seconds = now - began
            self.sure_seconds = self.call_seconds
            self.ended_at = now


class Engine:
    """S slots on the mesh of one host.

    In float32 (`model.compute_dtype`) what a context samples does not depend on its slot, its replica or the contexts
    in other slots. In bfloat16 it does where rounding decides between tokens, see `decode`.
    """

    def __init__(self, model: ModelConfig, settings: SamplingConfig, stop_ids: Sequence[int], mesh: Mesh):
        """`mesh` has local devices only: an engine never waits for another host. Raises ValueError as `Scheduler`."""
        replicas = replica_count(mesh)
        meshes = [mesh]
        if settings.engine_per_replica:
            rows = mesh.devices.reshape(replicas, 1, 1, -1)
            meshes = [Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types) for devices in rows]
        groups = len(meshes)
        self.scheduler = Scheduler(settings, replicas, groups)
        is_accelerator = mesh.devices.flat[0].platform != "cpu"
        self.is_async = {"auto": is_accelerator, "on": True, "off": False}[settings.async_scheduling]
        self._calls_in_flight = 2 if self.is_async else 1  # of each group, at most
        settings = replace(settings, slots=settings.slots // groups, kv_tokens=settings.kv_tokens // groups)
        self._groups = [
            _Group(number, mesh, ModelRunner(model, settings, tuple(stop_ids), mesh))
            for number, mesh in enumerate(meshes)
        ]
        self._order: deque[_Group] = deque()  # of the calls in flight, as they were dispatched
        self._started_at = 0.0

    def warm_up(self, params: Params) -> None:
        """Compiles every program that a step may need."""
        self._place(params, jax.random.key(0))
        for group in self._groups:
            assert group.weights is not None
            for step in self.scheduler.warm_up_steps():
                group.runner.run(step, *group.weights)
            group.weights = None

    def start(self, params: Params, root_key: Array) -> None:
        """Sets new weights and a new root key, and empties all caches.

        `params` are on the engine's mesh, a copy for each replica. Raises RuntimeError if a slot holds a context.
        """
        if held := self.scheduler.settings.slots - len(self.scheduler.free_slots):
            raise RuntimeError(f"{held} slots still hold contexts of the previous weights")
        self.stop()
        self._place(params, root_key)
        self._started_at = time.monotonic()
        for group in self._groups:
            group.ended_at = self._started_at

    def stop(self) -> SamplerStats:
        """Frees every slot, drops requests, results and weights, and returns what was done since `start`."""
        stats = self.scheduler.clear()
        stats.seconds = time.monotonic() - self._started_at
        stats.host_wait = sum(group.host_wait for group in self._groups) / len(self._groups)
        self._order.clear()
        for group in self._groups:
            group.runner.wait()  # for calls that are dropped
            group.weights = None
            group.calls.clear()
            group.has_work = False
            group.host_wait = 0.0
        return stats

    def release(self) -> None:
        """Stops, and gives the device memory of the cache back until the next `start`; nothing recompiles."""
        self.stop()
        for group in self._groups:
            group.runner.release()

    def step(self) -> list[FinishedGeneration]:
        """Dispatches what may be dispatched for each group, waits for the oldest call, returns what it finished."""
        for group in self._groups:
            while len(group.calls) < self._calls_in_flight and self._dispatch(group):
                pass
        if not self._order:
            return []
        group = self._order.popleft()
        call = group.calls.popleft()
        is_late = call.output is not None and group.runner.is_done(call.output)
        output = jax.device_get(call.output)
        now = time.monotonic()
        group.record_end(call, is_late, now)
        finished = self.scheduler.update(call.step, output)
        group.has_work = self.scheduler.is_active(group.number)
        return finished

    def keep_busy(self) -> None:
        """Dispatches the next call of groups whose devices have nothing left to do, with `async_scheduling`.

        For a host that handles what has ended, between two workflows.
        """
        for group in self._groups:
            if self.is_async and len(group.calls) < self._calls_in_flight and group.is_idle():
                self._dispatch(group)

    @property
    def seconds_left(self) -> float:
        """Seconds until the first group of devices may need its next call; 0 without calls in flight."""
        ends = [group.expected_end(group.sure_seconds) for group in self._groups if group.calls]
        return max(0.0, min(ends) - time.monotonic()) if ends else 0.0

    def _dispatch(self, group: _Group) -> bool:
        """Dispatches a group's next step; False if there is nothing to do."""
        if not self.scheduler.is_active(group.number):
            return False
        requested_at = self.scheduler.requested_at(group.number)
        step = self.scheduler.schedule(group.number)
        if step.is_empty:
            return False
        assert group.weights is not None, "`start` comes first"
        if group.is_idle():
            now = time.monotonic()
            idle_since = group.expected_end(group.call_seconds)
            if not group.calls and not group.has_work:
                idle_since = max(idle_since, requested_at)
            group.host_wait += max(0.0, now - idle_since)
        output = group.runner.run(step, *group.weights)
        group.calls.append(_Call(step, output, time.monotonic()))
        self._order.append(group)
        return True

    def _place(self, params: Params, root_key: Array) -> None:
        for group in self._groups:
            placed = params if len(self._groups) == 1 else on_submesh(params, group.mesh)
            group.weights = (placed, root_key)
