"""A corpus in memory or on disk: every passage's id and contents, and one checksum of them all."""

from __future__ import annotations

import hashlib
import io
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from memsearcher_jax.agent.types import Passage
from memsearcher_jax.jsonl import MalformedRow, id_field, numbered_lines, parse_object, text_field
from memsearcher_jax.retrieval.workplace import save_array

COLUMNS = ("ids", "contents")
REPORT_EVERY = 10_000  # rows


@dataclass(frozen=True)
class TextColumn:
    """Many texts as one run of bytes, so that 21 million passages are two arrays and not 21 million objects."""

    data: np.ndarray  # uint8 [bytes], UTF-8, one text after the other
    offset: np.ndarray  # int64 [rows + 1], where each text starts; the last entry is the end

    def __len__(self) -> int:
        return len(self.offset) - 1

    def __getitem__(self, row: int) -> str:
        start, end = self.offset[row : row + 2]
        return self.data[start:end].tobytes().decode()


@dataclass(frozen=True)
class Corpus:
    """Passages by row number; `checksum` names the content whatever file and compression it came from."""

    ids: TextColumn
    contents: TextColumn
    checksum: str  # sha256, hexadecimal

    def __len__(self) -> int:
        return len(self.ids)

    def passage(self, row: int, score: float = 0.0) -> Passage:
        return Passage(self.ids[row], self.contents[row], score)

    def texts(self, start: int, stop: int) -> list[str]:
        """Contents of the rows `start` to `stop`, without the row at `stop`."""
        return [self.contents[row] for row in range(start, min(stop, len(self)))]


def read_corpus(path: str | Path) -> Corpus:
    """Read a JSONL corpus of `{"id", "contents"}` rows (FlashRAG layout), plain or `.gz`, in one pass.

    Raises:
      FileNotFoundError, ValueError: one line that names the file, and the line where there is one: no such file,
        a malformed row, an id that was there before, no passage at all.
    """
    return _in_memory(_rows(Path(path)), name=str(path))


def corpus_of(passages: Iterable[Passage], name: str = "embedded corpus") -> Corpus:
    """The corpus that holds these passages, under the same rules as a file's; `name` is for error messages."""
    rows = (_Row(f"{name}:{row}", passage.id, passage.contents) for row, passage in enumerate(passages, start=1))
    return _in_memory(rows, name)


def store_corpus(path: str | Path, directory: Path, report: Callable[[int], None] = lambda rows: None) -> Corpus:
    """Read a JSONL corpus of any size into files in `directory`, and return it memory-mapped from there.

    In memory are 32 bytes a passage, while it reads. `report` hears now and then how many rows are read.
    Raises as `read_corpus` does, and OSError where the disk is full.
    """
    with (directory / "ids.bin").open("wb") as ids, (directory / "contents.bin").open("wb") as contents:
        gathered = _gather(_rows(Path(path)), ids, contents, str(path), report)
    for name, offset in zip(COLUMNS, gathered.offsets, strict=True):
        _save_offsets(directory, name, offset)
    corpus = open_corpus(directory, gathered.checksum)
    gathered.refuse_duplicates(corpus.ids, str(path))
    return corpus


def save_corpus(corpus: Corpus, directory: Path) -> None:
    """Write the files that `open_corpus` reads."""
    for name, column in zip(COLUMNS, (corpus.ids, corpus.contents), strict=True):
        with (directory / f"{name}.bin").open("wb") as file:
            file.write(column.data)
        _save_offsets(directory, name, column.offset)


def _save_offsets(directory: Path, name: str, offset: np.ndarray) -> None:
    with (directory / f"{name}.offset.npy").open("wb") as file:
        save_array(file, offset)


def open_corpus(directory: Path, checksum: str) -> Corpus:
    """The corpus in `directory`, memory-mapped. Raises OSError or ValueError if a file is missing or cut off."""
    columns = []
    for name in COLUMNS:
        offset = np.load(directory / f"{name}.offset.npy", mmap_mode="r")
        data = np.memmap(directory / f"{name}.bin", np.uint8, mode="r")
        if len(data) != offset[-1]:
            raise ValueError(f"{name}.bin has {len(data)} bytes, not {offset[-1]}")
        columns.append(TextColumn(data, offset))
    return Corpus(*columns, checksum)


def corpus_checksum(path: str | Path) -> str:
    """The checksum of a file's passages, in one pass that keeps nothing. Raises as `read_corpus` does on bad rows."""
    digest = hashlib.sha256()
    for row in _rows(Path(path)):
        digest.update(row.framed())
    return digest.hexdigest()


@dataclass(frozen=True)
class _Row:
    where: str  # "file:line"
    identity: str
    contents: str

    def framed(self) -> bytes:
        """Both texts with their lengths in front: without them ("ab", "c") and ("a", "bc") would look alike."""
        encoded_id, encoded_contents = self.identity.encode(), self.contents.encode()
        return b"%d:%d:" % (len(encoded_id), len(encoded_contents)) + encoded_id + encoded_contents


@dataclass(frozen=True)
class _Gathered:
    offsets: tuple[np.ndarray, np.ndarray]  # of ids and of contents
    fingerprint_R: np.ndarray  # uint64, of each id
    line_R: np.ndarray  # int64, where each row stood
    checksum: str

    def refuse_duplicates(self, ids: TextColumn, name: str) -> None:
        """Raise `MalformedRow` at the first row whose id an earlier row has.

        Sorted fingerprints need 8 bytes a row where a set of ids needs a hundred; equal ones are compared as text.
        """
        order = np.argsort(self.fingerprint_R, kind="stable")
        sorted_R = self.fingerprint_R[order]
        same = np.flatnonzero(sorted_R[1:] == sorted_R[:-1])
        repeats = sorted((order[i + 1], order[i]) for i in same if ids[order[i + 1]] == ids[order[i]])
        if repeats:
            row, earlier = repeats[0]
            raise MalformedRow(
                f'{name}:{self.line_R[row]}: id "{ids[row]}" is already the id of line {self.line_R[earlier]}'
            )


def _rows(path: Path) -> Iterator[_Row]:
    for where, line in numbered_lines(path):
        row = parse_object(where, line)
        yield _Row(where, id_field(where, row), text_field(where, row, "contents"))


def _in_memory(rows: Iterable[_Row], name: str) -> Corpus:
    ids, contents = io.BytesIO(), io.BytesIO()
    gathered = _gather(rows, ids, contents, name)
    columns = [
        TextColumn(np.frombuffer(file.getbuffer(), np.uint8), offset)
        for file, offset in zip((ids, contents), gathered.offsets, strict=True)
    ]
    gathered.refuse_duplicates(columns[0], name)
    return Corpus(*columns, gathered.checksum)


def _gather(
    rows: Iterable[_Row],
    ids: BinaryIO,
    contents: BinaryIO,
    name: str,
    report: Callable[[int], None] = lambda rows: None,
) -> _Gathered:
    """Write the texts one after the other, and note where they end."""
    ends, fingerprints, lines = (array("q", [0]), array("q", [0])), array("Q"), array("q")
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.framed())
        for file, text, column in zip((ids, contents), (row.identity, row.contents), ends, strict=True):
            column.append(column[-1] + file.write(text.encode()))
        fingerprints.append(int.from_bytes(hashlib.blake2b(row.identity.encode(), digest_size=8).digest()))
        lines.append(int(row.where.rpartition(":")[2]))
        if len(lines) % REPORT_EVERY == 0:
            report(len(lines))
    if not lines:
        raise ValueError(f"{name}: holds no passages")
    offsets = tuple(np.frombuffer(column, np.int64) for column in ends)
    fingerprint_R, line_R = np.frombuffer(fingerprints, np.uint64), np.frombuffer(lines, np.int64)
    return _Gathered(offsets, fingerprint_R, line_R, digest.hexdigest())
