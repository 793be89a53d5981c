"""A profile of one step for xprof: how long each phase, program and operation took on each device.

RUN/profile/plugins/profile/TIME/HOST.xplane.pb      xprof --logdir RUN/profile
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax


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


def check_step(step: int | None, first: int, end: int) -> None:
    """Raises ValueError, in one line, for a step that this start will not take."""
    if step is not None and not first <= step < end:
        raise ValueError(f"--profile {step}: this start takes the steps {first} to {end - 1}, choose one of them")
