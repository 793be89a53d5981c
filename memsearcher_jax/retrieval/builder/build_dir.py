"""Folders under construction: staging, locks, atomic writes, manifests, and the error message for a full disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from filelock import FileLock, Timeout

MANIFEST = "manifest.json"
FILES = "files"  # in a manifest: the size of each
NUMPY_DISK_FULL = re.compile(r"\d+ requested and \d+ written")  # the error of `np.save`, by which bm25s writes


def staging_dir(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.building")


def check_absent(directory: Path) -> None:
    """Raises FileExistsError if `directory` exists, unless it is an empty folder that another can replace."""
    if any(directory.iterdir()) if directory.is_dir() else directory.exists():
        raise FileExistsError(f"{directory}: already exists; choose another folder, or delete it to rebuild it")
    if directory.is_mount():
        raise FileExistsError(f"{directory}: is a mounted volume, which cannot be replaced; choose a folder in it")


@contextlib.contextmanager
def explain_disk_full(directory: Path) -> Iterator[None]:
    """Replace the error of a full disk, from the system or NumPy, by one that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) and not NUMPY_DISK_FULL.fullmatch(str(error)):
            raise
        raise OSError(f"{directory}: the disk is full; free some space and rerun the command to continue") from error


@contextlib.contextmanager
def explain_damage(directory: Path) -> Iterator[None]:
    """Replace the errors of a folder whose files are not what was written, by one that says what to do."""
    kinds = (OSError, ValueError, TypeError, AttributeError, LookupError, EOFError, RecursionError, BadZipFile)
    try:
        yield
    except kinds as error:
        raise ValueError(f"{directory}: is damaged or of another version ({error}); delete it to rebuild it") from error


@contextlib.contextmanager
def locked(directory: Path, name: str, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock next to the folder, and create the folder. A second process waits or gets a ValueError.

    The system releases the lock when the process ends for any reason.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    path = directory.with_name(f"{directory.name}.{name}.lock")
    lock = FileLock(path, timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(f"{directory}: another process is building here; wait for it, or stop it") from error
    try:
        directory.mkdir(exist_ok=True)
        yield
    finally:
        path.unlink(missing_ok=True)  # a process that waits for it notices, and takes the lock of a new file
        lock.release()


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Write a file that is complete or absent, also after a power cut or on a disk that becomes full."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")  # on a shared disk, pids are not unique
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_file(path, f"{json.dumps(value, indent=2)}\n".encode())


def write_manifest(directory: Path, content: dict[str, Any], omitted: Collection[str] = ()) -> None:
    """Write the manifest of a complete folder: `content`, and the size of every file but those `omitted`."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    sizes = {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}
    kept = {name: size for name, size in sizes.items() if name not in (*omitted, MANIFEST)}
    write_json(directory / MANIFEST, content | {FILES: kept})


def read_manifest(directory: Path, version: int) -> dict[str, Any]:
    """What `write_manifest` wrote, with the sizes of all files checked. Call it inside `explain_damage`."""
    manifest = json.loads((directory / MANIFEST).read_bytes())
    if manifest.get("format") != version:
        raise ValueError(f"format {manifest.get('format')}, this version reads {version}")
    for name, size in manifest[FILES].items():
        if (found := (directory / name).stat().st_size) != size:
            raise ValueError(f"{name} has {found} bytes, not {size}")
    return manifest
