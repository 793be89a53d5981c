"""Rollouts of a harness: an agent of another framework, which asks the policy over HTTP.

While a rollout runs, the endpoint (`harness_endpoint`) hands every request to the driver as a generation of a context.
A request holds a slot of the engine while it generates and no longer. So no trajectory waits for a slot that another
one holds between its requests, and a trajectory may ask any number of times at once. The pages of an extended context
are usually still in the cache, from which the next request takes them.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import jax
import numpy as np

from memsearcher_jax.rl.harness_endpoint import EndedHarness, Endpoint, Events, HarnessGeneration, HarnessSettings
from memsearcher_jax.rl.metrics import RolloutStats, device_memory
from memsearcher_jax.rl.rollout import Job, Params, Rollout, RolloutDriver
from memsearcher_jax.sampling.scheduler import FinishedGeneration
from memsearcher_jax.types import Context

SPARE_TRAJECTORIES = 1.0  # more than there are slots, as a share of them: a harness is busy between its requests
IDLE_SECONDS = 0.2  # without looking whether the run is to stop


@dataclass(frozen=True)
class HarnessDriver(RolloutDriver):
    """Makes rollouts of problems by a harness."""

    harness: HarnessSettings = field(kw_only=True)

    def run(
        self,
        jobs: Iterable[Job],
        params: Params,
        key: jax.Array,
        on_end: Callable[[Job, Rollout], None],
        *,
        version: int = 0,
        should_continue: Callable[[], bool] = lambda: True,
    ) -> RolloutStats:
        """As `RolloutDriver.run`. Where `should_continue` returns False the trajectories under way do not end."""
        began = time.monotonic()
        waiting_jobs = jobs if isinstance(jobs, deque) else deque(jobs)
        events: Events = queue.SimpleQueue()
        scheduler = self.engine.scheduler
        most = max(1, round(scheduler.settings.slots * (1 + SPARE_TRAJECTORIES)))
        waiting: deque[HarnessGeneration] = deque()
        running: dict[int, HarnessGeneration] = {}  # by slot
        kept_tokens = 0
        active = 0
        self.engine.start(params, key)
        try:
            with self.endpoint(events) as endpoint:
                while (active or waiting_jobs) and should_continue():
                    self.check()
                    while active < most and waiting_jobs:
                        endpoint.begin(waiting_jobs.popleft())
                        active += 1
                    for event in _drain(events, wait=not (scheduler.active or waiting)):
                        if isinstance(event, HarnessGeneration):
                            waiting.append(event)
                            continue
                        active -= 1
                        ended = _rollout(event, version)
                        kept_tokens += sum(int(np.sum(context.sampled)) for context in ended.contexts)
                        on_end(event.session.job, ended)
                    for slot in scheduler.free_slots:
                        if slot not in running and waiting:
                            generation = waiting.popleft()
                            self._open(slot, generation)
                            running[slot] = generation
                    if scheduler.active:
                        for finished in self.engine.step():
                            self._finish(running.pop(finished.slot), finished)
        finally:
            stats = self.engine.stop()
            for generation in (*waiting, *running.values()):
                generation.result.cancel()
        memory = device_memory([device.memory_stats() for device in jax.local_devices()])
        return RolloutStats(stats, time.monotonic() - began, (), memory, stats.generated_tokens - kept_tokens)

    def endpoint(self, events: Events) -> Endpoint:
        """What answers the harnesses of a rollout; it puts their requests and their ends into `events`."""
        params = self.sampling or self.engine.scheduler.settings.params
        return Endpoint(self.harness, self.tokenizer, self.engine.scheduler, params, self.backends, events)

    def _open(self, slot: int, generation: HarnessGeneration) -> None:
        rng_stream = (generation.session.job.number, generation.context.number)
        self.engine.scheduler.open_context(
            slot,
            generation.context.ids.tolist(),
            rng_stream,
            generation.max_tokens,
            generation.params,
            generation.find_stop,
        )

    def _finish(self, generation: HarnessGeneration, finished: FinishedGeneration) -> None:
        """Records the sampled tokens in the context, frees the slot, and answers the request."""
        recorded = self.engine.scheduler.pop_context(finished.slot)
        context = generation.context
        length = len(context.ids)
        context.ids = np.asarray(recorded.ids, np.int32)
        context.logprobs = np.concatenate([context.logprobs, np.asarray(recorded.logprobs, np.float32)[length:]])
        context.sampled = np.concatenate([context.sampled, np.asarray(recorded.sampled, bool)[length:]])
        generation.result.set_result(finished)


def _drain(events: Events, *, wait: bool) -> list[HarnessGeneration | EndedHarness]:
    """The events that have come; with `wait` it waits for one, for at most IDLE_SECONDS."""
    found: list[HarnessGeneration | EndedHarness] = []
    with contextlib.suppress(queue.Empty):
        if wait:
            found.append(events.get(timeout=IDLE_SECONDS))
        while True:
            found.append(events.get_nowait())
    return found


def _rollout(ended: EndedHarness, version: int) -> Rollout:
    """The trajectory of a harness that has ended: all contexts with a reply."""
    contexts = tuple(
        Context(context.ids, context.logprobs, context.sampled, version)
        for context in ended.session.contexts
        if context.sampled.any()
    )
    return Rollout(contexts, (), ended.outcome)
