"""The entry point of a pod: raises the limit of locked memory, then replaces itself with launch/tpu_train.py.

The TPU driver needs more locked memory than a container without privileges has by default, see
cloud.google.com/kubernetes-engine/docs/how-to/tpus#privileged-mode. Without a shell the trainer gets SIGTERM.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

TRAINER = Path(__file__).resolve().parents[1] / "tpu_train.py"


def raise_locked_memory() -> None:
    """Raises the limit as far as allowed; prints a warning if that is not without limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (ValueError, OSError):  # only the capability SYS_RESOURCE may raise the hard limit
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
        line = f"locked memory is limited to {hard:,} bytes, and TPUs may need more: add the capability SYS_RESOURCE"
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise_locked_memory()
    os.execv(sys.executable, [sys.executable, str(TRAINER), *sys.argv[1:]])
