"""Ctrl-C and SIGTERM end a command with one line and status 130, also while it waits for a compiler or a device.

Training replaces these handlers while it runs (`hosts/preemption.py`), because it has something to save.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from memsearcher_jax.hosts.ending import INTERRUPTED
from memsearcher_jax.hosts.preemption import handle_signals, signals_watched

UNWIND_SECONDS = 3.0  # in which the main thread may clean up


def end_at_once() -> None:
    """Ends the process at a signal: for the imports of a command, which leave nothing behind."""
    handle_signals(lambda number, frame: end())


@contextlib.contextmanager
def one_line_end() -> Iterator[None]:
    """Raises KeyboardInterrupt in the block at a signal; ends the process where that does not return from C++ in time.

    Whatever the block makes of it, the process ends with one line.
    """
    came = threading.Event()

    def interrupt(number: int, frame: Any) -> NoReturn:
        came.set()
        raise KeyboardInterrupt

    def end_soon(number: int) -> NoReturn:
        time.sleep(UNWIND_SECONDS)
        end()

    sys.unraisablehook = _ignore_interrupts  # a callback of an import or of a destructor cannot raise it
    with signals_watched(end_soon, interrupt):
        try:
            yield
        except KeyboardInterrupt:
            end()
        except Exception:  # of a library that was interrupted
            if came.is_set():
                end()
            raise


def end() -> NoReturn:
    """Ends the process at once: threads of C++ would crash it while the interpreter exits."""
    with contextlib.suppress(OSError):  # nobody reads stderr any more
        os.write(2, b"stopped\n")
    os._exit(INTERRUPTED)


def _ignore_interrupts(unraisable: Any) -> None:
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
