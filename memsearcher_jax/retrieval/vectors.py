"""Vectors on disk: shards that are whole or absent, and the files in which others publish theirs.

A corpus of 21 million passages is embedded in hours, by processes that are stopped now and then. So its vectors are
many small files, each written beside its place and renamed: what is there is done, what is missing is still to do.
Files are written, never mapped for writing: on a full disk a mapped write kills the process, and a write says so.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from memsearcher_jax.retrieval.workplace import save_array

Dtype = Literal["float32", "float16", "bfloat16"]
STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""numpy knows no bfloat16: its bits are kept as whole numbers."""

FLAT_INDEXES = {b"IxFI": "inner product", b"IxF2": "L2", b"IxFl": "either"}
"""First four bytes of the FAISS files that hold plain vectors, and what they compare them by."""

FLAT_HEADER = struct.Struct("<4siqqq?i")  # kind, D, rows, two unused, trained, metric
METRIC_L2 = 1
NORM_SAMPLE = 1_000  # rows of a published file whose norms are looked at


class Rows(Protocol):
    """Vectors of which a part can be had as an array: an array, or `Shards`."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> np.ndarray: ...


@dataclass(frozen=True)
class Shards:
    """The vectors of `rows` passages in files of `shard_rows` each. Reading gives float32 whatever is stored."""

    directory: Path
    rows: int
    size: int  # D
    dtype: Dtype
    shard_rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.size

    @property
    def count(self) -> int:
        return -(-self.rows // self.shard_rows)

    def __len__(self) -> int:
        return self.rows

    def path(self, shard: int) -> Path:
        return self.directory / f"{shard:06d}.npy"

    def span(self, shard: int) -> tuple[int, int]:
        """First row of a shard, and the row behind its last."""
        return shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.rows)

    def missing(self) -> list[int]:
        """Shards that are not there, by number. Raises ValueError for one of another size."""
        return [shard for shard in range(self.count) if not self.holds(shard)]

    def holds(self, shard: int) -> bool:
        path = self.path(shard)
        if not path.exists():
            return False
        start, stop = self.span(shard)
        if self._load(shard).shape != (stop - start, self.size):
            raise ValueError(f"{path}: holds other vectors than this index; delete it")
        return True

    def write(self, shard: int, vectors_BD: np.ndarray) -> None:
        """Store one shard. Raises ValueError for numbers that its type cannot hold, OSError where the disk is full."""
        beside = self.path(shard).with_suffix(".partial")
        with beside.open("wb") as file:
            save_array(file, _narrow(np.asarray(vectors_BD, np.float32), self.dtype))
            os.fsync(file.fileno())  # a name that points to nothing after a power cut would pass for done
        beside.rename(self.path(shard))

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.rows)
        out_BD = np.empty((max(stop - start, 0), self.size), np.float32)
        for shard in range(start // self.shard_rows, -(-stop // self.shard_rows)):
            first, last = self.span(shard)
            low, high = max(start, first), min(stop, last)
            out_BD[low - start : high - start] = _widen(self._load(shard)[low - first : high - first], self.dtype)
        return out_BD

    def _load(self, shard: int) -> np.ndarray:
        try:
            stored_BD = np.load(self.path(shard), mmap_mode="r")
        except (ValueError, EOFError) as error:
            raise ValueError(f"{self.path(shard)}: is damaged ({error})") from error
        if stored_BD.dtype != STORED[self.dtype]:
            raise ValueError(f"{self.path(shard)}: holds {stored_BD.dtype}, expected {self.dtype}")
        return stored_BD


def _narrow(vectors_BD: np.ndarray, dtype: Dtype) -> np.ndarray:
    if dtype == "bfloat16":
        # To nearest, ties to even, as hardware rounds.
        bits_BD = np.ascontiguousarray(vectors_BD).view(np.uint32)
        return ((bits_BD + np.uint32(0x7FFF) + (bits_BD >> 16 & np.uint32(1))) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        stored_BD = vectors_BD.astype(STORED[dtype])
    if not np.isfinite(stored_BD).all():
        raise ValueError(f"a number is too large for {dtype}: store these vectors as bfloat16 or float32")
    return stored_BD


def _widen(stored_BD: np.ndarray, dtype: Dtype) -> np.ndarray:
    if dtype == "bfloat16":
        return (stored_BD.astype(np.uint32) << 16).view(np.float32)
    return stored_BD


def read_published(path: Path) -> np.ndarray:
    """Vectors [R, D] that somebody else made, memory-mapped: a `.npy` array, or a flat index that FAISS wrote.

    Raises:
      FileNotFoundError, ValueError: one line that says why the file cannot serve.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    with path.open("rb") as file:
        magic = file.read(6)
    vectors_RD = _read_npy(path) if magic == b"\x93NUMPY" else _read_flat(path)
    if vectors_RD.ndim != 2 or not vectors_RD.size or vectors_RD.dtype not in (np.float16, np.float32, np.float64):
        raise ValueError(f"{path}: holds {vectors_RD.dtype} {list(vectors_RD.shape)}, expected rows of floating point")
    return vectors_RD


def _read_npy(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r")
    except ValueError as error:
        raise ValueError(f"{path}: is cut off, or no array of numbers ({error})") from error


def _read_flat(path: Path) -> np.ndarray:
    """A flat index as `faiss.write_index` lays it out: the header, the number of floats, the floats.

    Every other kind of FAISS index keeps its vectors in an order or a precision of its own, and is refused.
    """
    with path.open("rb") as file:
        head = file.read(FLAT_HEADER.size + 8)
    if head[:4] not in FLAT_INDEXES:
        raise ValueError(f"{path}: is neither a .npy array nor a flat FAISS index (it begins with {head[:4]!r})")
    if len(head) < FLAT_HEADER.size + 8:
        raise ValueError(f"{path}: is cut off")
    _, size, rows, _, _, _, metric = FLAT_HEADER.unpack_from(head)
    (floats,) = struct.unpack_from("<Q", head, FLAT_HEADER.size)
    expected = len(head) + 4 * rows * size
    if floats != rows * size or path.stat().st_size != expected:
        raise ValueError(
            f"{path}: has {path.stat().st_size} bytes where {rows} x {size} vectors need {expected}; "
            "a file that is published in parts must be joined first"
        )
    vectors_RD = np.memmap(path, "<f4", mode="r", offset=len(head), shape=(rows, size))
    if metric == METRIC_L2:
        _refuse_unless_unit(path, vectors_RD)
    return vectors_RD


def _refuse_unless_unit(path: Path, vectors_RD: np.ndarray) -> None:
    """L2 and inner products order alike where all norms are 1, and only there."""
    sample_BD = vectors_RD[np.linspace(0, len(vectors_RD) - 1, NORM_SAMPLE).astype(int)]
    if not np.allclose(np.linalg.norm(sample_BD, axis=1), 1, atol=1e-2):
        raise ValueError(f"{path}: compares by L2 and its vectors are not of norm 1; search here is by inner product")
