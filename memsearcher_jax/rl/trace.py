"""A trace of one step for xprof: which phase, which program and which operation took how long on each device.

RUN/profile/plugins/profile/TIME/HOST.xplane.pb      xprof --logdir RUN/profile
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType

import jax

FOLDER = "profile"
PYTHON_CALLS = 0  # each would be an event: they crowd out the device's own, of which a trace holds only so many


class Trace:
    """Records the step of number `step` in `out`; none, if it is None. Of several hosts the first one does.

    Call it with the number of each step as that begins. A context manager: leaving it ends a trace that is under way,
    also when the step fails.
    """

    def __init__(self, out: Path, step: int | None):
        self._folder = out / FOLDER
        self._step = step if jax.process_index() == 0 else None
        self._under_way = contextlib.ExitStack()

    def __call__(self, step: int) -> None:
        self._under_way.close()
        if step == self._step:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = PYTHON_CALLS
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._under_way.callback(jax.profiler.stop_trace)
            self._under_way.enter_context(jax.profiler.StepTraceAnnotation("train", step_num=step))

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._under_way.close()


def check_step(step: int | None, first: int, end: int) -> None:
    """Raises ValueError, in one line, for a step that this start will not take."""
    if step is not None and not first <= step < end:
        raise ValueError(f"--profile {step}: this start takes the steps {first} to {end - 1}, choose one of them")
