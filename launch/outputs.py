"""What commands write: the directory --out, which one process at a time may write, and result files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from memsearcher_jax.jsonl import encode_floats
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.run_facts import WEIGHTS_FILE
from memsearcher_jax.runs.inputs import COPIES, INPUTS_FILE
from memsearcher_jax.runs.run_dir import BUCKET_FILE, DATA, INDEX, TOKENIZER, is_run

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of network file systems without locks."""


@contextlib.contextmanager
def new_output_dir(out: Path | None, kind: str, locks: contextlib.ExitStack | None = None) -> Iterator[Path]:
    """The directory to write: `out`, or a dated one under runs/, locked as by `output_lock`.

    The lock is released at the end of the block, or when `locks` closes. If the block raises, what it wrote is removed.
    Raises ValueError or OSError if another process writes there, or if the directory is not empty.
    """
    folder = out or Path("runs") / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    require_vacant(folder)
    created = [directory for directory in (folder, *folder.parents) if not directory.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--out {folder} cannot be created ({error.strerror}): choose another directory") from error
    with contextlib.ExitStack() as on_error:
        on_error.callback(_remove_empty, created)
        lock = on_error.enter_context(contextlib.ExitStack())
        lock.enter_context(output_lock(folder))
        require_vacant(folder)  # another process may have finished meanwhile
        on_error.callback(_remove_all_but, folder, set(folder.iterdir()))
        yield folder
        on_error.pop_all()
        (locks or on_error).push(lock)


def require_vacant(folder: Path) -> None:
    """Raises OSError unless --out is new, empty, or holds only what a killed start has built.

    Data and index are written atomically and checked when they are opened, so another start may reuse them.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"--out {folder} is a file: choose a directory")
    if is_run(folder):
        raise FileExistsError(f"--out {folder} is not empty: continue the run there with --resume, or choose another")
    if folder.exists() and not all(_left_by_a_killed_start(path.name) for path in folder.iterdir()):
        raise FileExistsError(f"--out {folder} is not empty: choose another --out")


def _left_by_a_killed_start(name: str) -> bool:
    built = {DATA, INDEX, TOKENIZER, COPIES, INPUTS_FILE, BUCKET_FILE, WEIGHTS_FILE}
    return name in built or name.startswith(f".{INDEX}.") or name.endswith(".partial")


def require_new_file(out: Path) -> None:
    """Raises OSError unless the file --out can be written and replaces none."""
    if out.exists():
        raise FileExistsError(f"--out {out} exists: choose another file, or delete it")
    require_writable(out, "--out")


def require_writable(file: Path, flag: str) -> None:
    """Raises OSError if the file that `flag` names cannot be written after the work."""
    if file.exists() and not file.is_file():  # as root the rename at the end would replace a device
        raise OSError(f"{flag} {file} is a directory or a device: choose a file")
    folder = next(folder for folder in file.absolute().parents if folder.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise OSError(f"{flag} {file} cannot be written: {folder} is not a writable directory")


@contextlib.contextmanager
def output_lock(folder: Path, *, wait: float = 0.0) -> Iterator[None]:
    """Keeps other processes from writing the existing `folder`.

    Raises ValueError if another process does so for more than `wait` seconds.
    """
    path = folder.resolve()
    parent_is_writable = path.name and os.access(path.parent, os.W_OK)
    # Outside the directory, because an export replaces it; inside where the directory is a mounted volume.
    file = path.with_name(f".{path.name}.lock") if parent_is_writable else path / ".lock"
    lock = FileLock(file, timeout=wait)
    try:
        lock.acquire()
    except Timeout as error:
        busy = f"another process is writing --out {folder}: wait for it, stop it, or choose another directory"
        raise ValueError(busy) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(f"{file.parent} cannot be locked ({error.strerror}): start nothing else there", file=sys.stderr)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the directory was moved or removed
            file.unlink()  # a process that waits for it notices, and takes the lock of a new file
        lock.release()


def write_json(file: Path | None, result: dict[str, Any]) -> None:
    """Writes the result for --json atomically; "?" for lone surrogates, which UTF-8 cannot represent."""
    if file:
        text = json.dumps(encode_floats(result), indent=2, ensure_ascii=False, allow_nan=False)
        atomic_write(file, f"{text}\n".encode(errors="replace"))


def printable(message: object) -> str:
    """The message in one line; control characters, which a terminal would obey, are escaped."""
    line = " ".join(str(message).split())
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)


def _remove_all_but(folder: Path, kept: set[Path]) -> None:
    for path in set(folder.iterdir()) - kept:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _remove_empty(folders: Sequence[Path]) -> None:
    with contextlib.suppress(OSError):  # another process has written to one of them
        for folder in folders:
            folder.rmdir()
