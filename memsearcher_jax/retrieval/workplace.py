"""The folder in which an index is built: its name, its lock, its files, and what is said when the disk is full."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np

LOCK = ".lock"  # how the names of lock files end
NUMPY_FULL = re.compile(r"\d+ requested and \d+ written")  # all that `np.save` says of a full disk


def working_folder(directory: Path) -> Path:
    """Where `directory` is while it is built."""
    return directory.with_name(f".{directory.name}.building")


def refuse_existing(directory: Path) -> None:
    """Raises FileExistsError where a built index, or anything else, stands."""
    if directory.exists():
        raise FileExistsError(f"{directory}: exists already; name another folder, or delete it to build anew")


@contextlib.contextmanager
def disk_full_explained(working: Path) -> Iterator[None]:
    """Turns the system's word for a full disk, or NumPy's, into one that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) and not NUMPY_FULL.fullmatch(str(error)):
            raise
        raise OSError(
            f"{working}: the disk is full; make room and give the same command again, it goes on from here"
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


@contextlib.contextmanager
def whole_folder(directory: Path) -> Iterator[Path]:
    """A folder beside `directory` to write to: it gets that name when the block ends, and is deleted when it fails."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".partial", dir=directory.parent))
    try:
        with disk_full_explained(directory):
            yield beside
        beside.chmod(0o755)  # mkdtemp makes folders that only their owner may read
        beside.rename(directory)
    except BaseException:
        shutil.rmtree(beside)
        raise


def save_array(file: BinaryIO, array: np.ndarray) -> None:
    """As `np.save`, which does not notice a disk that fills up with its last few thousand bytes.

    NumPy writes to real files by itself, and does not look at what closing them says; this hides that it is one.
    """
    np.lib.format.write_array(SimpleNamespace(write=file.write), array, allow_pickle=False)
    file.flush()


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes the file whole or not at all."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    beside.write_text(json.dumps(value, indent=2) + "\n")
    beside.rename(path)
