"""Simulated devices for an engine: calls take the time of the roofline, and replies are scripted token ids.

A call is dispatched at once. Calls of one device run one after another, and its output can be read when the device has
finished. What the simulation itself computes is not counted as the host's time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memsearcher_jax.config import RunConfig
from memsearcher_jax.planning.flops import forward_flops
from memsearcher_jax.planning.roofline import CHIPS, Topology, matmul_param_bytes
from memsearcher_jax.sampling.decode import Decode, DecodeOutput
from memsearcher_jax.sampling.prefill import Prefill
from memsearcher_jax.sampling.scheduler import ScheduledStep

Replies = Mapping[tuple[int, int], Sequence[np.ndarray]]
"""The token ids of each generation, by the numbers of the trajectory and of its context."""


class WallClock:
    """The time of the wall. What the simulation computes delays the host, and is not counted in `host_seconds`."""

    def __init__(self) -> None:
        self._excluded = 0.0

    def now(self) -> float:
        return time.monotonic()

    def host_seconds(self) -> float:
        """CPU time of this process without the simulation."""
        return time.process_time() - self._excluded

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - time.monotonic()))

    @contextmanager
    def simulating(self) -> Iterator[None]:
        """What runs in this block belongs to the simulation."""
        began = time.process_time()
        yield
        self._excluded += time.process_time() - began


class CpuClock(WallClock):
    """Advances by the CPU time of this thread and by simulated waits: other processes do not disturb it."""

    def __init__(self) -> None:
        super().__init__()
        self._waited = 0.0

    def now(self) -> float:
        return time.thread_time() - self._excluded + self._waited

    def host_seconds(self) -> float:
        return time.thread_time() - self._excluded

    def wait_until(self, moment: float) -> None:
        self._waited += max(0.0, moment - self.now())

    @contextmanager
    def simulating(self) -> Iterator[None]:
        began = time.thread_time()
        yield
        self._excluded += time.thread_time() - began


@dataclass
class SimulatedDevice:
    """A device, or several that run the same calls: what they do, one call after another."""

    clock: WallClock
    free_at: float = 0.0  # when the last call ends
    busy: list[tuple[float, float]] = field(default_factory=list)  # begin and end of each call

    def dispatch(self, seconds: float) -> float:
        """Adds a call; the time at which it ends."""
        began = max(self.clock.now(), self.free_at)
        self.free_at = began + seconds
        self.busy.append((began, self.free_at))
        return self.free_at

    def busy_share(self, began: float, ended: float) -> float:
        """Share of the time between two moments in which a call ran."""
        seconds = sum(max(0.0, min(end, ended) - max(begin, began)) for begin, end in self.busy)
        return seconds / (ended - began)


@dataclass(frozen=True)
class PendingArray:
    """An array on a simulated device; to read it waits for the call that makes it."""

    value: np.ndarray
    ready_at: float
    clock: WallClock

    def is_ready(self) -> bool:
        return self.clock.now() >= self.ready_at

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.clock.wait_until(self.ready_at)
        return self.value


@dataclass
class _Progress:
    """How far a context is in its script."""

    generations: Iterator[np.ndarray]
    ids_T: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # of the current generation, the rest
    length: int = 0  # tokens of the context
    remaining: int = 0  # tokens that the generation may still add

    def begin(self, length: int, remaining: int) -> None:
        """Takes what the host says; a generation that has ended is followed by the next one."""
        self.length = length
        if not self.remaining:
            self.ids_T = next(self.generations)
        self.remaining = remaining

    def next_ids(self, steps: int) -> np.ndarray:
        ids_T = self.ids_T[: min(steps, self.remaining)]
        self.ids_T = self.ids_T[len(ids_T) :]
        self.length += len(ids_T)
        self.remaining = self.remaining - len(ids_T) if len(self.ids_T) else 0
        return ids_T


@dataclass
class CallTimes:
    """The seconds of a call on some devices of one host, at peak rates."""

    config: RunConfig
    topology: Topology  # `host_devices`: those that run the calls together
    speed: float = 1.0  # of the devices, as a multiple of the chip's

    def prefill(self, call: Prefill) -> float:
        tokens = call.ids_BT.size
        pairs = float(np.sum(call.length_A)) * self.config.sampling.prefill_chunk + tokens * 256
        flops = forward_flops(self.config.model, tokens, pairs, 0).forward
        return self._seconds(flops, self._param_bytes)

    def decode(self, steps: int, cached_tokens: float, tokens: int) -> float:
        """`cached_tokens`: those that all steps of all rows read; `tokens`: those that they generate."""
        model = self.config.model
        sampling = self.config.sampling
        flops = forward_flops(model, tokens, cached_tokens, tokens).forward
        kv_bytes = model.layers * model.kv_heads * sampling.kv_bytes(model.head_size, model.compute_itemsize)
        return self._seconds(flops, steps * self._param_bytes + cached_tokens * kv_bytes / self._devices)

    @property
    def _devices(self) -> int:
        return len(self.topology.host_devices)

    @property
    def _param_bytes(self) -> float:
        return matmul_param_bytes(self.config.model) / self.config.sampling.tensor

    def _seconds(self, flops: float, hbm_bytes: float) -> float:
        return self.topology.phase("call", flops / self._devices, hbm_bytes, 0.0).seconds / self.speed


class SimulatedRunner:
    """Takes the place of a ModelRunner."""

    def __init__(self, device: SimulatedDevice, times: CallTimes, replies: Replies, steps: int):
        self._device = device
        self._times = times
        self._replies = replies
        self._steps = steps
        self._contexts: dict[tuple[int, int], _Progress] = {}

    def release(self) -> None:
        self._contexts.clear()

    def run(self, step: ScheduledStep, params: Any, root_key: Any) -> DecodeOutput | None:
        with self._device.clock.simulating():
            for call in step.calls:
                self._device.dispatch(self._times.prefill(call) if isinstance(call, Prefill) else 0.0)
            if step.decode is None:
                return None
            return self._decode(step.decode)

    def wait(self) -> None:
        """The engine stops: nothing waits for calls that are dropped."""

    def is_done(self, output: DecodeOutput) -> bool:
        return output.count_A.is_ready()

    def _decode(self, call: Decode) -> DecodeOutput:
        A = len(call.length_A)
        token_AJ = np.zeros((A, self._steps), np.int32)
        count_A = np.zeros(A, np.int32)
        remaining_A = np.zeros(A, np.int32)
        cached_tokens = 0.0
        for row in np.flatnonzero(call.remaining_A).tolist():
            trajectory, number = call.rng_stream_A2[row].tolist()
            progress = self._progress(trajectory, number)
            if not call.continues_A[row]:
                progress.begin(int(call.length_A[row]), int(call.remaining_A[row]))
            ids_T = progress.next_ids(self._steps)
            count = len(ids_T)
            token_AJ[row, :count] = ids_T
            count_A[row] = count
            remaining_A[row] = progress.remaining
            cached_tokens += count * (progress.length - count / 2)
        iterations = int(count_A.max(initial=0))
        ready_at = self._device.dispatch(self._times.decode(iterations, cached_tokens, int(count_A.sum())))
        logprob_AJ = np.full((A, self._steps), -0.5, np.float32)
        arrays = (token_AJ, logprob_AJ, count_A, remaining_A, np.ones(A, bool))
        return DecodeOutput(*(PendingArray(array, ready_at, self._device.clock) for array in arrays))

    def _progress(self, trajectory: int, number: int) -> _Progress:
        progress = self._contexts.get((trajectory, number))
        if progress is None:
            progress = _Progress(iter(self._replies[trajectory, number]))
            self._contexts[trajectory, number] = progress
        return progress


def host_topology(generation: str, shape: Sequence[int], host_chips: int) -> Topology:
    """The chips of one host of a slice."""
    devices = range(int(np.prod(shape)) * CHIPS[generation].devices)
    return Topology.of(generation, shape, devices, range(host_chips * CHIPS[generation].devices))
