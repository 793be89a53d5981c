"""The hosts of one run: the index of this one, the exchange of bytes, and how all agree on a stop.

Every host samples at its own pace. They meet where a step's examples are gathered, at every update and at every
checkpoint; there all of them call the same programs in the same order, or they would wait for each other forever.
So no host may leave alone: a host that is asked to stop says so at the next meeting, and all leave there.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils

from memsearcher_jax.hosts.ending import EndReason, RunEnded

# One call carries between these many bytes for each host. The sizes are powers of two, so that few are compiled.
MIN_BYTES = 1 << 12
MAX_BYTES = 1 << 24
Result = TypeVar("Result")


class Interrupted(Exception):
    """Work of this host was interrupted, because the run is to stop."""


@dataclass(frozen=True)
class Hosts:
    """This host of the run, and how many there are: by default one."""

    index: int = 0
    count: int = 1
    training: threading.Event = field(default_factory=threading.Event)  # set once there may be something to save
    stopping: threading.Event = field(default_factory=threading.Event)  # set once the run is to stop
    reasons: list[tuple[EndReason, str]] = field(default_factory=list)

    @property
    def first(self) -> bool:
        """Whether this is the host that writes the shared files."""
        return self.index == 0

    def share(self, count: int) -> range:
        """The numbers of this host's contiguous share of `count` items."""
        first = count * self.index // self.count
        end = count * (self.index + 1) // self.count
        return range(first, end)

    def stop(self, reason: EndReason, message: str) -> None:
        """Asks this host to stop. Any thread may call it."""
        self.reasons.append((reason, message))
        self.stopping.set()

    def check(self) -> None:
        """Raises Interrupted once the run is to stop."""
        if self.stopping.is_set():
            raise Interrupted

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Work of this host alone: what goes wrong in it ends the block, and the run where all hosts meet next."""
        try:
            yield
        except Interrupted:
            pass
        except JaxRuntimeError:
            raise  # of a device or of a lost host: the hosts cannot meet
        except (ConnectionError, TimeoutError) as error:
            self.stop(EndReason.OUTAGE, f"{type(error).__name__}: {error}")
        except Exception as error:
            traceback.print_exc()
            self.stop(EndReason.FAILURE, f"{type(error).__name__}: {error}")

    def agreed(self, work: Callable[[], Result]) -> Result:
        """`work` on every host. Raises RunEnded on all of them if it fails on one."""
        results: list[Result] = []
        with self.guarded():
            results.append(work())
        if self.exchange(b"" if results else None) is None:
            raise self.ended()
        return results[0]

    def ended(self) -> RunEnded:
        """The exception to raise on all hosts, each of which must call this: with the reason that counts most."""
        ours = [(reason.value, message) for reason, message in self.reasons]
        everyone = self.exchange(json.dumps(ours).encode()) or []
        endings = []
        for of_host in everyone:
            endings += [RunEnded(EndReason(value), message) for value, message in json.loads(of_host)]
        order = list(EndReason)
        return max(endings, key=lambda ending: order.index(ending.reason))

    def exchange(self, content: bytes | None) -> list[bytes] | None:
        """What every host gives, in their order; None on all of them if one gives None. All hosts must call it."""
        if self.count == 1:
            return None if content is None else [content]
        sizes = multihost_utils.process_allgather(np.int32(-1 if content is None else len(content))).reshape(-1)
        if content is None or sizes.min() < 0:
            return None
        largest = int(sizes.max())
        next_power_of_two = 1 << (largest - 1).bit_length()
        width = min(MAX_BYTES, max(MIN_BYTES, next_power_of_two))
        chunks: list[list[bytes]] = [[] for _ in sizes]
        for start in range(0, largest, width):
            chunk = np.frombuffer(content[start : start + width], np.uint8)
            gathered = multihost_utils.process_allgather(np.pad(chunk, (0, width - len(chunk))))
            for host_chunks, row, size in zip(chunks, gathered, sizes, strict=True):
                host_chunks.append(row[: max(0, size - start)].tobytes())
        return [b"".join(host_chunks) for host_chunks in chunks]

    def in_turn(self, work: Callable[[], Result]) -> Result:
        """`work` on the first host, then on the others: they find what the first one has built."""
        if not self.first:
            self.barrier("first is done")
        try:
            return work()
        finally:
            if self.first:
                self.barrier("first is done")

    def barrier(self, name: str) -> None:
        """Waits for all hosts, each of which must call it with the same name."""
        if self.count > 1:
            multihost_utils.sync_global_devices(name)
