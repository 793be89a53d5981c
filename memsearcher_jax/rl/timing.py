"""Wall-clock time of the phases of a step, and a profile of one step for xprof, which shows the same phases.

RUN/profile/plugins/profile/TIME/HOST.xplane.pb      xprof --logdir RUN/profile
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def profiled(run: Path, step: int) -> Iterator[None]:
    """Writes a profile of the block, which is this step, to the run's folder, also if it fails."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a profile holds a limited number of events, and Python's would fill it
    with (
        jax.profiler.trace(run / "profile", profiler_options=options),
        jax.profiler.StepTraceAnnotation("train", step_num=step),
    ):
        yield
