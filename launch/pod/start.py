"""The first program of a pod: raises the limit of locked memory as far as it may, and becomes launch/tpu_train.py.

The TPU's driver moves data to and from locked memory, and a container that is not privileged begins with too little of
it: cloud.google.com/kubernetes-engine/docs/how-to/tpus#privileged-mode. Without a shell in between, so that SIGTERM
reaches the trainer.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

TRAINER = Path(__file__).resolve().parents[1] / "tpu_train.py"
NEEDED = 64 << 30  # bytes; what Google's page names


def main(argv: Sequence[str]) -> None:
    raise_locked_memory()
    os.execv(sys.executable, [sys.executable, str(TRAINER), *argv])


def raise_locked_memory() -> None:
    """As high as this process may; says so on stderr where that is less than the driver needs."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (ValueError, OSError):  # only the capability SYS_RESOURCE may raise the hard limit
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
        if hard != resource.RLIM_INFINITY and hard < NEEDED:
            print(
                f"locked memory is limited to {hard:,} bytes and a TPU's driver may need {NEEDED:,}: "
                "add the capability SYS_RESOURCE",
                file=sys.stderr,
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
