"""Trajectories written one at a time: a process that is killed loses none that it had finished.

Each line of the file is compressed by itself (a gzip member), and members that follow each other are a gzip file like
any other: `read_trajectories` reads it, and so does `zcat`. A process that was killed while it wrote leaves a torn last
member. `read_log` stops before it, and `TrajectoryLog` cuts it off before it appends.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from memsearcher_jax.report.trajectories import Scored, decode, encode

_GZIP = 16 + zlib.MAX_WBITS
_CHUNK = 1 << 20


class TrajectoryLog:
    """Appends to the file at `path`, which is made if it is not there. Use it as a context manager.

    Only one process may have a file open in this way; others may read it meanwhile.
    """

    def __init__(self, path: Path):
        """Raises ValueError if the file is damaged before its last line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_end(path)
        self._file = path.open("ab")

    def append(self, scored: Scored) -> None:
        """The trajectory is on disk when this returns."""
        self._file.write(gzip.compress(encode(scored), compresslevel=6, mtime=0))
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> TrajectoryLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def read_log(path: Path) -> Iterator[Scored]:
    """The whole trajectories of a file that may still be written to. Raises ValueError where it is damaged."""
    for number, (_, line) in enumerate(_members(path), start=1):
        yield decode(f"{path}:{number}", line)


def cut_torn_end(path: Path) -> int:
    """Cuts off the bytes behind the last whole line, if there are any; returns how many."""
    if not path.exists():
        return 0
    whole = max((end for end, _ in _members(path)), default=0)
    torn = path.stat().st_size - whole
    if torn:
        os.truncate(path, whole)
    return torn


def _members(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset behind it, text) of each whole member. What ends too early is torn; all else that is wrong is damage."""
    whole, text, member = 0, [], zlib.decompressobj(_GZIP)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            while chunk:
                try:
                    text.append(member.decompress(chunk))
                except zlib.error as error:
                    raise ValueError(
                        f"{path}: compressed data is damaged behind byte {whole} ({error}): move the file away, and "
                        "its questions are asked again"
                    ) from error
                chunk = member.unused_data
                if member.eof:
                    whole = file.tell() - len(chunk)
                    yield whole, b"".join(text)
                    text, member = [], zlib.decompressobj(_GZIP)
