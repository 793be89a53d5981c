"""One host of a job: the trainer with injected faults. run_job.py starts it.

The variable FAULTS holds JSON: {"host": 0, "triggered": DIR, "faults": [Fault, ...]}. A fault, SIGKILL or SIGTERM,
leaves a file in DIR when it is triggered, and is not triggered again when the job is restarted.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from memsearcher_jax.launch import cli, tpu_train
from memsearcher_jax.logs.progress import Progress

VARIABLE = "FAULTS"
PHASES = ("rollout", "rewards", "gather", "update", "publish", "evaluate", "write")
HEARTBEAT_SECONDS = 30  # JAX's default is 100, for which a host would wait for one that was killed while writing
SIGNALS = {"kill": signal.SIGKILL, "sigterm": signal.SIGTERM}


@dataclass(frozen=True)
class Fault:
    """A fault `seconds` after `host` has begun `phase` of `step`, both counted from 0."""

    kind: str
    host: int
    step: int
    phase: str
    seconds: float = 0.0
    number: int = 0  # unique in a job

    @classmethod
    def parse(cls, kind: str, text: str, number: int = 0) -> Fault:
        """Reads HOST@stepN:PHASE+SECONDS. Raises ValueError."""
        match = re.fullmatch(r"(\d+)@step(\d+):([a-z]+)(?:\+(\d+(?:\.\d+)?))?", text)
        if not match or match[3] not in PHASES:
            phases = ", ".join(PHASES)
            raise ValueError(f"--{kind} {text}: write HOST@stepN:PHASE+SECONDS with one of the phases {phases}")
        return cls(kind, int(match[1]), int(match[2]), match[3], float(match[4] or 0), number)

    def __str__(self) -> str:
        seconds = f"+{self.seconds:g}" if self.seconds else ""
        return f"{self.kind} {self.host}@step{self.step}:{self.phase}{seconds}"


def inject(faults: Collection[Fault], host: int, triggered: Path) -> type[Progress]:
    """A progress display that triggers the faults of `host` at their phases."""

    class FaultyProgress(Progress):
        def __init__(self, label: str, total: int, *, done: int = 0, **rest: Any):
            super().__init__(label, total, done=done, **rest)
            self._step = done

        def activity(self, text: str) -> None:
            super().activity(text)
            for fault in faults:
                file = triggered / str(fault.number)
                due = (fault.host, fault.step, fault.phase) == (host, self._step, text)
                if due and not file.exists():
                    file.touch()
                    trigger(fault)

        def advance(self, metrics: Any, *, by: int = 1) -> None:
            super().advance(metrics, by=by)
            self._step += by

    return FaultyProgress


def trigger(fault: Fault) -> None:
    print(f"host {fault.host}: fault: {fault}", file=sys.stderr, flush=True)
    if not fault.seconds:
        os.kill(os.getpid(), SIGNALS[fault.kind])
        return
    timer = threading.Timer(fault.seconds, os.kill, (os.getpid(), SIGNALS[fault.kind]))
    timer.daemon = True
    timer.start()


def main(argv: list[str]) -> None:
    values = json.loads(os.environ[VARIABLE])
    faults = [Fault(**fault) for fault in values["faults"]]
    jax.distributed.initialize = partial(jax.distributed.initialize, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    tpu_train.main(argv, inject(faults, values["host"], Path(values["triggered"])))


if __name__ == "__main__":
    cli.run(main)
