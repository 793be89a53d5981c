"""Wall-clock time of the phases of a step, which a trace shows by their names too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

from memsearcher_jax.report.names import PHASE_PREFIX


class Phases:
    """Seconds by phase; a phase entered twice adds up. `tell` hears the name of each phase that begins."""

    def __init__(self, tell: Callable[[str], None]):
        self._tell = tell
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._tell(name)
        began = time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation(name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def __getitem__(self, name: str) -> float:
        return self._seconds[name]

    @property
    def metrics(self) -> dict[str, float]:
        """Under the names that displays and plots know."""
        return {PHASE_PREFIX + name: seconds for name, seconds in self._seconds.items()}
