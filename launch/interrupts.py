"""Ctrl-C and SIGTERM end a command with one line and status 130, also while it waits for a compiler or a device.

Training replaces these handlers while it runs (`runtime/preemption.py`), because it has something to save.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from typing import NoReturn

INTERRUPTED = 130  # exit status, as in a shell
UNWIND_SECONDS = 3.0  # in which the main thread may clean up


def end_on_signals() -> None:
    """Raises KeyboardInterrupt in the main thread; ends the process where that does not return from C++ in time."""
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    # The thread keeps the sender open.
    threading.Thread(target=_watch, args=(receiver, sender), daemon=True).start()


def end() -> NoReturn:
    """Ends the process at once: threads of C++ would crash it while the interpreter exits."""
    with contextlib.suppress(OSError):  # nobody reads stderr any more
        os.write(2, b"stopped\n")
    os._exit(INTERRUPTED)


def _watch(receiver: socket.socket, _: socket.socket) -> None:
    while receiver.recv(1)[0] not in (signal.SIGINT, signal.SIGTERM):
        pass
    time.sleep(UNWIND_SECONDS)
    end()
