"""One host of a rehearsal: the real trainer, with the faults that befall it. Started by rehearse.py.

REHEARSAL holds JSON: {"host": 0, "marks": FOLDER, "faults": [{"number", "kind", "host", "step", "phase", "seconds"}]}.
A fault leaves a mark before it strikes, so that it strikes once, however often the job is started; but for `nan`, which
is of the data and comes again whenever its step does.

    kill, term   the signal, after `seconds`
    delay        waits so many seconds
    clock        the time of day jumps by so many seconds
    full         for so many seconds no file can grow beyond FULL_BYTES: writes fail, of Python and of C++ alike
    cut, slow, garbage   a mark alone: rehearse.py lets the retriever be gone, silent, or out of its mind
    nan          one context of every update of the step has an advantage that is no number
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # where the other commands are

import cli
import tpu_train

from memsearcher_jax.report.progress import Progress

VARIABLE = "REHEARSAL"
OF_RETRIEVER = ("cut", "slow", "garbage")
FULL_BYTES = 64 << 10  # room for the log, which has to tell of it, and not for the weights
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM}


def watched(told: dict[str, Any]) -> type[Progress]:
    """A display that lets the faults of `told` strike where they are due."""
    due = [fault for fault in told["faults"] if fault["host"] == told["host"] and fault["kind"] != "nan"]
    poisoned = {fault["step"] for fault in told["faults"] if fault["kind"] == "nan"}

    class Watched(Progress):
        def __init__(self, label: str, total: int, *, done: int = 0, **rest: Any):
            super().__init__(label, total, done=done, **rest)
            self._step = done
            if poisoned:
                poison(poisoned, lambda: self._step)

        def activity(self, text: str) -> None:
            super().activity(text)
            for fault in due:
                mark = Path(told["marks"]) / str(fault["number"])
                if (fault["step"], fault["phase"]) == (self._step, text) and not mark.exists():
                    mark.write_text(str(time.time()))
                    strike(fault, told["host"])

        def advance(self, metrics: Any, *, by: int = 1) -> None:
            super().advance(metrics, by=by)
            self._step += by

    return Watched


def strike(fault: dict[str, Any], host: int) -> None:
    """Now, or after the fault's seconds."""
    print(f"host {host}: fault: {named(fault)}", file=sys.stderr, flush=True)
    kind, seconds = fault["kind"], fault["seconds"]
    if kind == "delay":
        time.sleep(seconds)
    elif kind == "clock":
        real = time.time
        time.time = lambda: real() + seconds
    elif kind == "full":
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, limits[1]))
        later(seconds, resource.setrlimit, resource.RLIMIT_FSIZE, limits)
    elif kind in SIGNALS:
        later(seconds, os.kill, os.getpid(), SIGNALS[kind])


def later(seconds: float, what: Callable[..., object], *arguments: Any) -> None:
    """At once for 0 seconds."""
    if not seconds:
        what(*arguments)
        return
    timer = threading.Timer(seconds, what, arguments)
    timer.daemon = True
    timer.start()


def poison(steps: set[int], now: Callable[[], int]) -> None:
    """From here on the first context of an update has no finite advantage, in these steps."""
    from memsearcher_jax.rl.trainer import Trainer

    place = Trainer._place

    def poisoned(self: Trainer, rows: Any) -> Any:
        if now() not in steps:
            return place(self, rows)
        advantage_BT = rows.advantage_BT.copy()
        advantage_BT[rows.mask_BT & (rows.segment_BT == 1)] = float("nan")
        return place(self, replace(rows, advantage_BT=advantage_BT))

    Trainer._place = poisoned


def named(fault: dict[str, Any]) -> str:
    """The fault as it is written on the command line."""
    seconds = f"+{fault['seconds']:g}" if fault["seconds"] else ""
    return f"{fault['kind']} {fault['host']}@step{fault['step']}:{fault['phase']}{seconds}"


def main(argv: list[str]) -> None:
    tpu_train.main(argv, watched(json.loads(os.environ[VARIABLE])))


if __name__ == "__main__":
    cli.run(main)
