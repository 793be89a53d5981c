"""Vectors on disk: the shards of an index, and files of precomputed embeddings.

Embedding 21 million passages takes hours, in processes that are interrupted now and then. The vectors are therefore
stored in many small shards, each written to a temporary file and renamed: a shard is complete or missing. Files are
never mapped for writing: on a full disk a mapped write kills the process, and a normal write raises an error.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from memsearcher_jax.retrieval.builder.build_dir import write_file

SHARD_ROWS = 4_096  # passages in one file of vectors: the most work that an interruption of a build loses
FLAT_KIND = b"IxFI"  # first bytes of FAISS's uncompressed vectors that are compared by inner product
FLAT_HEADER = struct.Struct("<4siqqq?iQ")  # kind, D, rows, two unused, trained, metric, number of floats


@dataclass(frozen=True)
class EmbeddingShards:
    """The vectors of `rows` passages in files of SHARD_ROWS each."""

    directory: Path
    rows: int
    size: int  # D
    dtype: str  # as stored: float32 or float16

    @property
    def count(self) -> int:
        return -(-self.rows // SHARD_ROWS)

    def path(self, shard: int) -> Path:
        return self.directory / f"{shard:06d}.npy"

    def row_range(self, shard: int) -> range:
        return range(shard * SHARD_ROWS, min((shard + 1) * SHARD_ROWS, self.rows))

    def missing(self) -> list[int]:
        """The numbers of the missing shards. Raises as `load` for the others."""
        missing = [shard for shard in range(self.count) if not self.path(shard).exists()]
        for shard in set(range(self.count)).difference(missing):
            self.load(shard)
        return missing

    def write(self, shard: int, vectors_BD: np.ndarray) -> None:
        """Store one shard. Raises ValueError for numbers that overflow its type, OSError if the disk is full."""
        with np.errstate(over="ignore"):
            stored_BD = vectors_BD.astype(self.dtype)
        if not np.isfinite(stored_BD).all():
            raise ValueError(f"a number is too large for {self.dtype}: store these vectors as float32")
        content = io.BytesIO()  # `np.save` to a file misses a disk that becomes full during the last kilobytes
        np.save(content, stored_BD, allow_pickle=False)
        write_file(self.path(shard), content.getbuffer())

    def load(self, shard: int) -> np.ndarray:
        """One shard as stored, memory-mapped. Raises ValueError if it is damaged or of another index."""
        path = self.path(shard)
        shape = (len(self.row_range(shard)), self.size)
        try:
            stored_BD = np.load(path, mmap_mode="r")
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path}: is damaged ({error}); delete it") from error
        if (stored_BD.dtype, stored_BD.shape) != (self.dtype, shape):
            found = f"{stored_BD.dtype} {stored_BD.shape}"
            raise ValueError(f"{path}: contains {found}, not {self.dtype} {shape}; delete it")
        return stored_BD

    def row(self, number: int) -> np.ndarray:
        """The vector of one passage, as stored."""
        shard, offset = divmod(number, SHARD_ROWS)
        return self._mapped(shard)[offset]

    @cached_property
    def _maps(self) -> dict[int, np.ndarray]:
        return {}

    def _mapped(self, shard: int) -> np.ndarray:
        if shard not in self._maps:
            self._maps[shard] = self.load(shard)
        return self._maps[shard]

    def read(self) -> np.ndarray:
        """All vectors, float32 [R, D]."""
        vectors_RD = np.empty((self.rows, self.size), np.float32)
        for shard in range(self.count):
            vectors_RD[shard * SHARD_ROWS : (shard + 1) * SHARD_ROWS] = self.load(shard)
        return vectors_RD


def read_embeddings(path: Path) -> np.ndarray:
    """Memory-map precomputed vectors [R, D]: a `.npy` array or a flat FAISS index.

    Raises FileNotFoundError or ValueError, in one line with the reason why the file cannot be used.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    with path.open("rb") as file:
        header = file.read(FLAT_HEADER.size)
    if header.startswith(b"\x93NUMPY"):
        try:
            vectors_RD = np.load(path, mmap_mode="r")
        except ValueError as error:
            raise ValueError(f"{path}: is truncated, or not an array of numbers ({error})") from error
    else:
        vectors_RD = _read_flat_index(path, header)
    if vectors_RD.ndim != 2 or not vectors_RD.size or vectors_RD.dtype.kind != "f":
        raise ValueError(f"{path}: contains {vectors_RD.dtype} {list(vectors_RD.shape)}, expected rows of floats")
    return vectors_RD


def _read_flat_index(path: Path, header: bytes) -> np.ndarray:
    """Map the vectors of a file written by `faiss.write_index`: a header, then the floats.

    Other FAISS indexes reorder or compress their vectors, or compare them otherwise, and are rejected.
    """
    if header[:4] != FLAT_KIND:
        found = f"is neither a .npy array nor FAISS's IndexFlatIP (it begins with {header[:4]!r})"
        raise ValueError(f"{path}: {found}: write the vectors to a .npy file")
    if len(header) < FLAT_HEADER.size:
        raise ValueError(f"{path}: is truncated")
    _, size, rows, *_, floats = FLAT_HEADER.unpack(header)
    found = path.stat().st_size
    expected = FLAT_HEADER.size + 4 * rows * size
    if floats != rows * size or found != expected:
        needed = f"{rows} x {size} vectors need {expected}"
        raise ValueError(f"{path}: has {found} bytes, but {needed}; join the parts of one published in parts")
    return np.memmap(path, "<f4", mode="r", offset=FLAT_HEADER.size, shape=(rows, size))
