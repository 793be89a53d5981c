"""Writes three traces into the folder it is given. In a process of its own, because starting a trace brings down one
that has loaded as many libraries as a whole test run does."""

import sys
from contextlib import suppress
from pathlib import Path

import jax
import jax.numpy as jnp

from memsearcher_jax.rl.phases import Phases
from memsearcher_jax.rl.trace import Trace


def take_steps(trace: Trace, count: int) -> None:
    @jax.jit
    def multiply(x):
        return x @ x

    for step in range(count):
        trace(step)
        phases = Phases(lambda name: None)
        with phases("rollout"):
            multiply(jnp.ones((64, 64))).block_until_ready()


def main(out: Path) -> None:
    with Trace(out / "one", 1) as trace:
        take_steps(trace, 3)
    with suppress(ZeroDivisionError), Trace(out / "fails", 0) as trace:
        take_steps(trace, 1)
        raise ZeroDivisionError
    with Trace(out / "next", 0) as trace:
        take_steps(trace, 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
