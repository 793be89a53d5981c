"""A corpus in memory or on disk: the id and contents of every passage, and a checksum of the content."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BufferedWriter, BytesIO
from pathlib import Path

import numpy as np

from memsearcher_jax.jsonl import MalformedRow, id_field, numbered_lines, parse_object, text_field
from memsearcher_jax.retrieval.builder.build_dir import save_array
from memsearcher_jax.types import Passage

COLUMNS = ("ids", "contents")
PROGRESS_ROWS = 10_000


@dataclass(frozen=True)
class TextColumn:
    """Texts in one byte array, so that 21 million passages are two arrays and not 21 million objects."""

    data: np.ndarray  # uint8 [bytes], concatenated UTF-8
    offset: np.ndarray  # int64 [rows + 1], where each text starts; the last entry is the end

    def __len__(self) -> int:
        return len(self.offset) - 1

    def __getitem__(self, row: int) -> str:
        start, end = self.offset[row : row + 2]
        return self.data[start:end].tobytes().decode()


@dataclass(frozen=True)
class Corpus:
    """Passages by row number; `checksum` depends on the content only, not on the file or its compression."""

    ids: TextColumn
    contents: TextColumn
    checksum: str  # sha256, hexadecimal

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Passage]:
        return map(self.passage, range(len(self)))

    def passage(self, row: int, score: float = 0.0) -> Passage:
        return Passage(self.ids[row], self.contents[row], score)

    def texts(self, start: int, stop: int) -> list[str]:
        """The contents of the rows from `start` up to, but not including, `stop`."""
        return [self.contents[row] for row in range(start, min(stop, len(self)))]


def read_corpus(path: str | Path) -> Corpus:
    """Read a JSONL corpus of `{"id", "contents"}` rows (FlashRAG layout), plain or `.gz`, in one pass.

    Raises:
      FileNotFoundError, ValueError: one line with the file and, where it applies, the line: no such file, a malformed
        row, a duplicate id, no passages.
    """
    return _concatenate(_read_rows(Path(path)), (BytesIO(), BytesIO()), str(path))


def make_corpus(passages: Iterable[Passage]) -> Corpus:
    """The corpus of these passages, under the same rules as a file."""
    name = "synthetic encyclopedia"
    rows = ((f"{name}:{row}", passage) for row, passage in enumerate(passages, start=1))
    return _concatenate(rows, (BytesIO(), BytesIO()), name)


def store_corpus(path: str | Path, directory: Path, on_progress: Callable[[int], None] = lambda rows: None) -> Corpus:
    """Read a JSONL corpus of any size into files in `directory` and return it memory-mapped.

    Needs 48 bytes of memory per passage. `on_progress` receives the number of rows read so far.
    Raises as `read_corpus` does, and OSError if the disk is full.
    """
    with (directory / "ids.bin").open("wb") as ids, (directory / "contents.bin").open("wb") as contents:
        corpus = _concatenate(_read_rows(Path(path)), (ids, contents), str(path), on_progress)
    for name, column in zip(COLUMNS, (corpus.ids, corpus.contents), strict=True):
        save_array(directory / f"{name}.offset.npy", column.offset)
    return open_corpus(directory, corpus.checksum)


def save_corpus(corpus: Corpus, directory: Path) -> None:
    for name, column in zip(COLUMNS, (corpus.ids, corpus.contents), strict=True):
        (directory / f"{name}.bin").write_bytes(column.data.data)
        save_array(directory / f"{name}.offset.npy", column.offset)


def open_corpus(directory: Path, checksum: str) -> Corpus:
    """The corpus in `directory`, memory-mapped. Raises OSError or ValueError if a file is missing or truncated."""

    def open_column(name: str) -> TextColumn:
        offset = np.load(directory / f"{name}.offset.npy", mmap_mode="r")
        data = np.memmap(directory / f"{name}.bin", np.uint8, mode="r")
        if len(data) != offset[-1]:
            raise ValueError(f"{name}.bin has {len(data)} bytes, not {offset[-1]}")
        if offset[0] != 0 or (offset[1:] < offset[:-1]).any():
            raise ValueError(f"the offsets of {name}.bin do not ascend")
        return TextColumn(data, offset)

    return Corpus(open_column("ids"), open_column("contents"), checksum)


def corpus_checksum(path: str | Path) -> str:
    """The checksum of a file's passages, in one pass without storing them. Raises as `read_corpus` does on bad rows."""
    digest = hashlib.sha256()
    for _, passage in _read_rows(Path(path)):
        digest.update(_framed(passage))
    return digest.hexdigest()


def _framed(passage: Passage) -> bytes:
    """Both texts with their lengths, without which ("ab", "c") and ("a", "bc") would have the same checksum."""
    encoded_id, encoded_contents = passage.id.encode(), passage.contents.encode()
    return b"%d:%d:" % (len(encoded_id), len(encoded_contents)) + encoded_id + encoded_contents


def _read_rows(path: Path) -> Iterator[tuple[str, Passage]]:
    """("file:line", passage) of every row."""
    for location, line in numbered_lines(path):
        row = parse_object(location, line)
        yield location, Passage(id_field(location, row), text_field(location, row, "contents"))


def _concatenate(
    rows: Iterable[tuple[str, Passage]],
    files: tuple[BufferedWriter | BytesIO, BufferedWriter | BytesIO],
    name: str,
    on_progress: Callable[[int], None] = lambda rows: None,
) -> Corpus:
    """Write ids and contents to `files`, and return the corpus over what they contain then.

    Raises `MalformedRow` at the first row with the id of an earlier row. To find it, sorted hashes need 8 bytes per
    row, a set of ids about a hundred; rows with equal hashes are compared as text.
    """
    ends, hashes, lines = (array("q", [0]), array("q", [0])), array("Q"), array("q")
    digest = hashlib.sha256()
    for location, passage in rows:
        digest.update(_framed(passage))
        for file, text, column in zip(files, (passage.id, passage.contents), ends, strict=True):
            column.append(column[-1] + file.write(text.encode()))
        hashes.append(int.from_bytes(hashlib.blake2b(passage.id.encode(), digest_size=8).digest()))
        lines.append(int(location.rpartition(":")[2]))
        if len(lines) % PROGRESS_ROWS == 0:
            on_progress(len(lines))
    if not lines:
        raise ValueError(f"{name}: contains no passages")
    ids, contents = (
        TextColumn(_written(file), np.frombuffer(column, np.int64)) for file, column in zip(files, ends, strict=True)
    )
    hash_R = np.frombuffer(hashes, np.uint64)
    order = np.argsort(hash_R, kind="stable")
    same = np.flatnonzero(np.diff(hash_R[order]) == 0)
    duplicates = [(order[i + 1], order[i]) for i in same if ids[order[i + 1]] == ids[order[i]]]
    if duplicates:
        row, earlier = min(duplicates)
        raise MalformedRow(f'{name}:{lines[row]}: id "{ids[row]}" is already the id of line {lines[earlier]}')
    return Corpus(ids, contents, digest.hexdigest())


def _written(file: BufferedWriter | BytesIO) -> np.ndarray:
    if isinstance(file, BytesIO):
        return np.frombuffer(file.getbuffer(), np.uint8)
    file.flush()
    return np.memmap(file.name, np.uint8, mode="r")
