"""Locks between processes, on files that exist only while a process holds or waits for them. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

POLL_SECONDS = 0.5
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # by some network file systems


@contextlib.contextmanager
def locked(file: Path, busy: str, *, wait: float = 0.0) -> Iterator[None]:
    """Holds a lock on `file`, whose directory must exist. The system releases it when the process ends for any reason.

    If another process still holds the lock after `wait` seconds, raises ValueError(busy). Raises OSError if the file
    cannot be created. A file system without locks is reported on stderr.
    """
    end = time.monotonic() + wait
    while True:
        with file.open("w") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno == errno.EWOULDBLOCK and time.monotonic() < end:
                    time.sleep(POLL_SECONDS)
                    continue
                if error.errno not in UNSUPPORTED:
                    raise ValueError(busy) from error
                print(f"{file.parent} cannot be locked ({error.strerror}): start nothing else there", file=sys.stderr)
            # The process that held the lock may have removed the file meanwhile: a lock on that one excludes nobody.
            try:
                is_locked = os.path.samestat(os.fstat(stream.fileno()), file.stat())
            except FileNotFoundError:
                is_locked = False
            if not is_locked:
                continue
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # the directory was moved or removed
                    file.unlink()
        return
