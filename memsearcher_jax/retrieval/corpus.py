"""A corpus on disk, memory-mapped: the id and contents of every passage, and a checksum of the content."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memsearcher_jax.jsonl import MalformedRow, id_field, numbered_lines, parse_object, text_field
from memsearcher_jax.retrieval.builder.build_dir import save_array
from memsearcher_jax.types import Passage

COLUMNS = ("ids", "contents")
PROGRESS_ROWS = 10_000

Source = Path | Iterable[Passage]
"""A JSONL file of `{"id", "contents"}` rows (FlashRAG's layout), plain or `.gz`; or passages that were made."""


def source_name(source: Source) -> str:
    return str(source) if isinstance(source, Path) else "the made corpus"


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


def read_passages(source: Source) -> Iterator[tuple[str, Passage]]:
    """("source:line", passage) of every row.

    Raises:
      FileNotFoundError, ValueError: one line with the file and, where it applies, the line: no such file, or a
        malformed row.
    """
    if not isinstance(source, Path):
        yield from ((f"{source_name(source)}:{row}", passage) for row, passage in enumerate(source, start=1))
        return
    for location, line in numbered_lines(source):
        row = parse_object(location, line)
        yield location, Passage(id_field(location, row), text_field(location, row, "contents"))


def corpus_checksum(source: Source) -> str:
    """The checksum of the passages, in one pass without storing them. Raises as `read_passages` does."""
    digest = hashlib.sha256()
    for _, passage in read_passages(source):
        digest.update(_framed(passage))
    return digest.hexdigest()


def store_corpus(source: Source, directory: Path, on_progress: Callable[[int], None] = lambda rows: None) -> Corpus:
    """Write the passages of a source of any size to files in `directory`, and return the corpus over these files.

    To find duplicate ids, sorted hashes need 8 bytes per row, a set of ids about a hundred; rows with equal hashes are
    compared as text. `on_progress` receives the number of rows so far.

    Raises as `read_passages` does, ValueError for an id that occurs twice or no passages, OSError for a full disk.
    """
    ends, hashes, lines = (array("q", [0]), array("q", [0])), array("Q"), array("q")
    digest = hashlib.sha256()
    with (directory / "ids.bin").open("wb") as ids, (directory / "contents.bin").open("wb") as contents:
        for location, passage in read_passages(source):
            digest.update(_framed(passage))
            for file, text, column in zip((ids, contents), (passage.id, passage.contents), ends, strict=True):
                column.append(column[-1] + file.write(text.encode()))
            hashes.append(int.from_bytes(hashlib.blake2b(passage.id.encode(), digest_size=8).digest()))
            lines.append(int(location.rpartition(":")[2]))
            if len(lines) % PROGRESS_ROWS == 0:
                on_progress(len(lines))
    if not lines:
        raise ValueError(f"{source_name(source)}: contains no passages")
    for name, column in zip(COLUMNS, ends, strict=True):
        save_array(directory / f"{name}.offset.npy", np.frombuffer(column, np.int64))
    corpus = open_corpus(directory, digest.hexdigest())
    hash_R = np.frombuffer(hashes, np.uint64)
    order = np.argsort(hash_R, kind="stable")
    same = np.flatnonzero(np.diff(hash_R[order]) == 0)
    duplicates = [(order[i + 1], order[i]) for i in same if corpus.ids[order[i + 1]] == corpus.ids[order[i]]]
    if duplicates:
        row, earlier = min(duplicates)
        where = f"{source_name(source)}:{lines[row]}"
        raise MalformedRow(f'{where}: id "{corpus.ids[row]}" is already the id of line {lines[earlier]}')
    return corpus


def open_corpus(directory: Path, checksum: str) -> Corpus:
    """The corpus in `directory`. Raises OSError or ValueError if a file is missing or truncated."""

    def open_column(name: str) -> TextColumn:
        offset = np.load(directory / f"{name}.offset.npy", mmap_mode="r")
        data = np.memmap(directory / f"{name}.bin", np.uint8, mode="r")
        if len(data) != offset[-1]:
            raise ValueError(f"{name}.bin has {len(data)} bytes, not {offset[-1]}")
        if offset[0] != 0 or (offset[1:] < offset[:-1]).any():
            raise ValueError(f"the offsets of {name}.bin do not ascend")
        return TextColumn(data, offset)

    return Corpus(open_column("ids"), open_column("contents"), checksum)


def _framed(passage: Passage) -> bytes:
    """Both texts with their lengths, without which ("ab", "c") and ("a", "bc") would have the same checksum."""
    encoded_id, encoded_contents = passage.id.encode(), passage.contents.encode()
    return b"%d:%d:" % (len(encoded_id), len(encoded_contents)) + encoded_id + encoded_contents
