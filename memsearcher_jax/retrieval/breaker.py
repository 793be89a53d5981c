"""A circuit breaker (Nygard, "Release It!", 2007): what keeps failing is left alone for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class CircuitBreaker:
    """Counts failures in a row. Threads may share it.

    Closed at first: every call may go ahead. After `failures` in a row it opens, and calls are refused for `cooldown`
    seconds. Then one call may try; if it succeeds the circuit is closed again, else it stays open as long once more.
    """

    failures: int = 3
    cooldown: float = 30.0
    clock: Callable[[], float] = time.monotonic
    _failed: int = field(default=0, init=False)
    _closed_at: float = field(default=0.0, init=False)  # when the next call may go ahead
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def tripped(self) -> bool:
        """Whether the last calls failed: one that goes ahead now is a trial."""
        return self._failed >= self.failures

    def refuses(self) -> float:
        """Seconds for which a call must wait, 0 if it may go ahead. Whoever goes ahead must report how it went."""
        with self._lock:
            wait = self._closed_at - self.clock()
            if wait > 0:
                return wait
            if self.tripped:
                self._closed_at = self.clock() + self.cooldown  # the others wait for this trial
            return 0.0

    def succeeded(self) -> None:
        with self._lock:
            self._failed, self._closed_at = 0, 0.0

    def failed(self) -> None:
        with self._lock:
            self._failed += 1
            if self.tripped:
                self._closed_at = self.clock() + self.cooldown
