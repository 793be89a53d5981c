"""Folders under construction: staging, locks, atomic writes, manifests, and the error message for a full disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from memsearcher_jax import file_lock

MANIFEST = "manifest.json"
FILES, OWN_CHECKSUM = "files", "manifest_checksum"  # in a manifest
NUMPY_DISK_FULL = re.compile(r"\d+ requested and \d+ written")  # the error of `np.save` on a full disk


def staging_dir(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.building")


def check_absent(directory: Path) -> None:
    """Raises FileExistsError if `directory` exists, unless it is an empty folder."""
    if any(directory.iterdir()) if directory.is_dir() else directory.exists():
        raise FileExistsError(f"{directory}: already exists; choose another folder, or delete it to rebuild it")


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
def locked(directory: Path, name: str, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock next to the folder, and create the folder. A second process waits or gets a ValueError.

    The system releases the lock when the process ends for any reason.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    busy = f"{directory}: another process is building here; wait for it, or stop it"
    with file_lock.locked(directory.with_name(f"{directory.name}.{name}.lock"), busy, wait=math.inf if wait else 0.0):
        directory.mkdir(exist_ok=True)
        yield


def save_array(path: Path, array: np.ndarray) -> None:
    """As `np.save`, which misses a disk that becomes full during the last few kilobytes.

    NumPy writes to real files with C code that ignores the result of closing them; the namespace hides the file.
    """
    with path.open("wb") as file:
        stream: Any = SimpleNamespace(write=file.write)
        np.lib.format.write_array(stream, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())  # or a power cut after the file is renamed would leave it empty


def write_json(path: Path, value: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("w") as file:
        file.write(json.dumps(value, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())  # as in `save_array`
    partial.rename(path)


def write_manifest(directory: Path, content: dict[str, Any], omitted: Collection[str] = ()) -> None:
    """Write the manifest of a complete folder: `content`, and size and checksum of every file but those `omitted`."""
    files = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name not in omitted and name != MANIFEST:
            files[name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    content = content | {FILES: files}
    write_json(directory / MANIFEST, content | {OWN_CHECKSUM: _json_sha256(content)})


def read_manifest(directory: Path, version: int) -> dict[str, Any]:
    """What `write_manifest` wrote, with the sizes of all files checked.

    Raises OSError for a missing file, ValueError for a format other than `version`, a change or another size.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
    except RecursionError as error:
        raise ValueError(f"{MANIFEST} is nested too deeply") from error
    if not isinstance(manifest, dict):
        raise ValueError(f"{MANIFEST} is not a JSON object")
    if manifest.get("format") != version:
        raise ValueError(f"format {manifest.get('format')}, this version reads {version}")
    if manifest.pop(OWN_CHECKSUM, None) != _json_sha256(manifest):
        raise ValueError(f"{MANIFEST} was changed")
    for name, file in manifest[FILES].items():
        if (size := (directory / name).stat().st_size) != file["bytes"]:
            raise ValueError(f"{name} has {size} bytes, not {file['bytes']}")
    return manifest


def verify_files(directory: Path, version: int) -> int:
    """Compare every file of the folder with its checksum. Returns the bytes read; raises as `read_manifest`."""
    files = read_manifest(directory, version)[FILES]
    for name, file in files.items():
        if file_sha256(directory / name) != file["sha256"]:
            raise ValueError(f"the checksum of {name} differs")
    return sum(file["bytes"] for file in files.values())


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json_sha256(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
