"""The folder in which an index is built: its name, its lock, and what is said when the disk is full."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOCK = ".lock"  # how the names of lock files end


def working_folder(directory: Path) -> Path:
    """Where `directory` is while it is built."""
    return directory.with_name(f".{directory.name}.building")


def refuse_existing(directory: Path) -> None:
    """Raises FileExistsError where a built index, or anything else, stands."""
    if directory.exists():
        raise FileExistsError(f"{directory}: exists already; name another folder, or delete it to build anew")


@contextlib.contextmanager
def disk_full_explained(working: Path) -> Iterator[None]:
    """Turns the system's word for a full disk into one that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            error.errno,
            f"{working}: the disk is full; make room and give the same command again, it goes on from here",
        ) from error


@contextlib.contextmanager
def locked(working: Path, name: str, *, wait: bool = False) -> Iterator[None]:
    """Makes the folder, and keeps a second process from the same work there: it waits, or gets a ValueError.

    The system lets go of the lock when a process ends, however it ends.
    """
    working.mkdir(parents=True, exist_ok=True)
    with (working / f"{name}{LOCK}").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            raise ValueError(f"{working}: another process is building here; wait for it, or stop it") from error
        yield


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes the file whole or not at all."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    beside.write_text(json.dumps(value, indent=2) + "\n")
    beside.rename(path)
