"""Wall-clock time of the phases of a step, which a profile shows under the same names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

from memsearcher_jax.logs.metric_names import PHASE_PREFIX


class Timer:
    """Seconds by phase; a phase entered twice adds up. `notify` gets the name of each phase as it begins."""

    def __init__(self, notify: Callable[[str], None] = lambda line: None):
        self.notify = notify
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.notify(phase)
        began = time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation(phase):
                yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - began

    @property
    def metrics(self) -> dict[str, float]:
        """Seconds under the names that displays and plots know."""
        return {PHASE_PREFIX + phase: seconds for phase, seconds in self._seconds.items()}
