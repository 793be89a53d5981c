"""Writes three profiler traces into a folder.

Runs in a process of its own: starting a trace crashes a process that has loaded as many libraries as the test run.
"""

import sys
from contextlib import suppress
from pathlib import Path

import jax
import jax.numpy as jnp

from memsearcher_jax.runtime.profiler import StepProfiler
from memsearcher_jax.runtime.timing import Timer


def take_steps(profiler: StepProfiler, count: int) -> None:
    @jax.jit
    def multiply(x):
        return x @ x

    for step in range(count):
        profiler(step)
        timer = Timer(lambda name: None)
        with timer("rollout"):
            multiply(jnp.ones((64, 64))).block_until_ready()


def main(out: Path) -> None:
    with StepProfiler(out / "single_step", 1) as profiler:
        take_steps(profiler, 3)
    with suppress(ZeroDivisionError), StepProfiler(out / "failed_step", 0) as profiler:
        take_steps(profiler, 1)
        raise ZeroDivisionError
    with StepProfiler(out / "after_failure", 0) as profiler:
        take_steps(profiler, 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
