"""The hosts of one run: which of them this is, what they tell each other, and how they agree on a stop.

Every host samples at its own pace. They meet where a step's samples are put together, at every update and at every
checkpoint; there all of them call the same programs in the same order, or they would wait for each other forever.
Nobody may therefore leave alone: whoever is told to stop says so at the next meeting, and all leave there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.experimental import multihost_utils

LEAST, MOST = 1 << 12, 1 << 24  # bytes that one call carries for each host: few sizes, so that little is compiled


class Interrupted(Exception):
    """A rollout was broken off, because the run is to stop."""


class Stopped(Exception):
    """All hosts have stopped at the same step; all that was done until then is saved."""

    def __init__(self, step: int, reason: str):
        super().__init__(f"stopped after step {step} ({reason}); all until then is saved")
        self.step = step


@dataclass(frozen=True)
class Hosts:
    """By default a run on one host."""

    index: int = 0
    count: int = 1
    stopping: threading.Event = field(default_factory=threading.Event)  # set by whoever hears that the run is to stop
    reasons: list[str] = field(default_factory=list)  # why; the first counts

    @property
    def first(self) -> bool:
        """Whether this is the host that writes what is written once."""
        return self.index == 0

    def stop(self, reason: str) -> None:
        """From now on this host wants to stop. Any thread may call it."""
        self.reasons.append(reason)
        self.stopping.set()

    def check(self) -> None:
        """Raises Interrupted once the run is to stop."""
        if self.stopping.is_set():
            raise Interrupted

    def stopped(self, step: int) -> Stopped:
        """What to raise when all have agreed."""
        return Stopped(step, self.reasons[0] if self.reasons else "another host was told to stop")

    def exchange(self, own: bytes | None) -> list[bytes] | None:
        """What every host gives, in their order; None on all of them if one gives None. All hosts must call it."""
        if self.count == 1:
            return None if own is None else [own]
        sizes = multihost_utils.process_allgather(np.int32(-1 if own is None else len(own))).reshape(-1)
        if sizes.min() < 0:
            return None
        width = min(MOST, max(LEAST, 1 << int(sizes.max() - 1).bit_length()))
        parts: list[list[bytes]] = [[] for _ in sizes]
        for start in range(0, int(sizes.max()), width):
            piece = np.frombuffer(own[start : start + width], np.uint8)
            together = multihost_utils.process_allgather(np.pad(piece, (0, width - len(piece))))
            for part, row, size in zip(parts, together, sizes, strict=True):
                part.append(row[: max(0, size - start)].tobytes())
        return [b"".join(part) for part in parts]

    def in_turn(self, work: Callable[[], object]) -> object:
        """`work` on the first host, and when it is done on the others: what the first one builds, they find."""
        if not self.first:
            self.meet("first is done")
        try:
            done = work()
        finally:
            if self.first:
                self.meet("first is done")
        return done

    def meet(self, name: str) -> None:
        """Waits for all hosts, each of which must call it with the same name."""
        if self.count > 1:
            multihost_utils.sync_global_devices(name)


def these() -> Hosts:
    """The hosts whose devices JAX sees."""
    return Hosts(jax.process_index(), jax.process_count())
