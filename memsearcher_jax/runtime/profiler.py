"""A profile of one step for xprof: how long each phase, program and operation took on each device.

RUN/profile/plugins/profile/TIME/HOST.xplane.pb      xprof --logdir RUN/profile
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import jax

FOLDER = "profile"


class StepProfiler(contextlib.AbstractContextManager):
    """Profiles the step of number `step` on the first host; None profiles nothing.

    Call it with the number of each step as it begins. Leaving the context ends a profile in progress, also when the
    step fails.
    """

    def __init__(self, out: Path, step: int | None):
        self._folder = out / FOLDER
        self._step = step if jax.process_index() == 0 else None
        self._running = contextlib.ExitStack()

    def __call__(self, step: int) -> None:
        self._running.close()
        if step == self._step:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # a profile holds a limited number of events, and Python's would fill it
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._running.callback(jax.profiler.stop_trace)
            self._running.enter_context(jax.profiler.StepTraceAnnotation("train", step_num=step))

    def __exit__(self, *exception: object) -> None:
        self._running.close()


def check_step(step: int | None, first: int, end: int) -> None:
    """Raises ValueError, in one line, for a step that this start will not take."""
    if step is not None and not first <= step < end:
        raise ValueError(f"--profile {step}: this start takes the steps {first} to {end - 1}, choose one of them")
