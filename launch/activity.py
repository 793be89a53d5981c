"""Lines on stderr while a command has nothing to show yet: it loads, builds an index or compiles."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def announced(activity: str = "starting", every_s: float = 8.0) -> Iterator[Callable[[str], None]]:
    """Prints what takes long every `every_s` seconds, with its age: `activity`, or what the given function was called
    with since.
    """
    current, ended = (activity, time.monotonic()), threading.Event()

    def begin(activity: str) -> None:
        nonlocal current
        current = activity, time.monotonic()

    def repeat() -> None:
        while not ended.wait(every_s):
            activity, began = current
            print(f"{activity} … {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=repeat, name="activity", daemon=True)
    thread.start()
    try:
        yield begin
    finally:
        ended.set()
        thread.join()
