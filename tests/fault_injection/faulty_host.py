"""One host of a job: the trainer with injected faults. run_job.py starts it.

The variable FAULTS holds JSON: {"host": 0, "triggered": DIR, "faults": [Fault, ...]}. A fault leaves a file in DIR when
it is triggered, and is not triggered again when the job is restarted; except `nan`, which repeats with its step.

    kill, sigterm    the signal, after `seconds`
    disk_full        no file can grow beyond FULL_BYTES for `seconds`: writes fail, in Python and in C++
    search_outage    only the file: run_job.py stops the search service
    nan              one context in every update of the step has an advantage of NaN
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memsearcher_jax.launch import cli, tpu_train
from memsearcher_jax.logs.progress import Progress

VARIABLE = "FAULTS"
PHASES = ("rollout", "rewards", "gather", "update", "publish", "evaluate", "write")
FULL_BYTES = 64 << 10  # enough for the log, which reports the failure, but not for the weights
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
            if nan_steps := {fault.step for fault in faults if fault.kind == "nan"}:
                poison_advantages(lambda: self._step in nan_steps)

        def activity(self, text: str) -> None:
            super().activity(text)
            for fault in faults:
                file = triggered / str(fault.number)
                due = (fault.host, fault.step, fault.phase) == (host, self._step, text) and fault.kind != "nan"
                if due and not file.exists():
                    file.touch()
                    trigger(fault)

        def advance(self, metrics: Any, *, by: int = 1) -> None:
            super().advance(metrics, by=by)
            self._step += by

    return FaultyProgress


def trigger(fault: Fault) -> None:
    print(f"host {fault.host}: fault: {fault}", file=sys.stderr, flush=True)
    match fault.kind:
        case "disk_full":
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, hard))
            call_after(fault.seconds, resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
        case "kill" | "sigterm":
            call_after(fault.seconds, os.kill, os.getpid(), SIGNALS[fault.kind])


def call_after(seconds: float, function: Callable[..., object], *arguments: Any) -> None:
    """Calls in a thread, or immediately for 0 seconds."""
    if not seconds:
        function(*arguments)
        return
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()


def poison_advantages(due: Callable[[], bool]) -> None:
    """From now on the first context of each update gets an advantage of NaN while `due()`."""
    from memsearcher_jax.training.trainer import Trainer

    shard = Trainer._shard

    def poisoned(self: Trainer, rows: Any) -> Any:
        if not due():
            return shard(self, rows)
        advantage_BT = rows.advantage_BT.copy()
        advantage_BT[rows.mask_BT & (rows.segment_BT == 1)] = float("nan")
        return shard(self, replace(rows, advantage_BT=advantage_BT))

    Trainer._shard = poisoned


def main(argv: list[str]) -> None:
    values = json.loads(os.environ[VARIABLE])
    faults = [Fault(**fault) for fault in values["faults"]]
    tpu_train.main(argv, inject(faults, values["host"], Path(values["triggered"])))


if __name__ == "__main__":
    cli.run(main)
