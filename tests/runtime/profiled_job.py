"""Writes a profile of the second of three steps into a folder, and prints the events in it: [name, statistics].

Runs in a process of its own: traces crash a process that has loaded as many libraries as the test run.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from memsearcher_jax.runtime.profiler import StepProfiler
from memsearcher_jax.runtime.timing import Timer


@jax.jit
def multiply(x):
    return x @ x


def main(out: Path) -> None:
    with StepProfiler(out, 1) as profiler:
        for step in range(3):
            profiler(step)
            with Timer()("rollout"):
                multiply(jnp.ones((64, 64))).block_until_ready()
    (file,) = (out / "profile" / "plugins" / "profile").glob("*/*.xplane.pb")  # the format of xprof
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    events = [(event.name, dict(event.stats)) for plane in planes for line in plane.lines for event in line.events]
    print(json.dumps(events, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
