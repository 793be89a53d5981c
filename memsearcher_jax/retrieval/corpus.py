"""A corpus in memory or on disk: every passage's id and contents, and one checksum of them all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memsearcher_jax.agent.types import Passage
from memsearcher_jax.jsonl import MalformedRow, id_field, numbered_lines, parse_object, text_field


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
    path = Path(path)

    def rows() -> Iterable[tuple[str, str, str]]:
        for where, line in numbered_lines(path):
            row = parse_object(where, line)
            yield where, id_field(where, row), text_field(where, row, "contents")

    return _collect(rows(), name=str(path))


def corpus_of(passages: Iterable[Passage], name: str = "embedded corpus") -> Corpus:
    """The corpus that holds these passages, under the same rules as a file's; `name` is for error messages."""
    return _collect(
        ((f"{name}:{row}", passage.id, passage.contents) for row, passage in enumerate(passages, start=1)), name
    )


def _collect(rows: Iterable[tuple[str, str, str]], name: str) -> Corpus:
    """Gather `(where, id, contents)` rows into columns, with the checksum and the check for duplicates."""
    id_bytes, content_bytes = bytearray(), bytearray()
    id_ends, content_ends, fingerprints, places = [0], [0], [], []
    digest = hashlib.sha256()
    for where, identity, contents in rows:
        encoded_id, encoded_contents = identity.encode(), contents.encode()
        # Lengths go in front: without them ("ab", "c") and ("a", "bc") would look alike.
        digest.update(b"%d:%d:" % (len(encoded_id), len(encoded_contents)) + encoded_id + encoded_contents)
        id_bytes += encoded_id
        content_bytes += encoded_contents
        id_ends.append(len(id_bytes))
        content_ends.append(len(content_bytes))
        fingerprints.append(int.from_bytes(hashlib.blake2b(encoded_id, digest_size=8).digest()))
        places.append(int(where.rpartition(":")[2]))
    if not places:
        raise ValueError(f"{name}: holds no passages")
    ids = _column(id_bytes, id_ends)
    _refuse_duplicates(ids, np.array(fingerprints, np.uint64), places, name)
    return Corpus(ids, _column(content_bytes, content_ends), digest.hexdigest())


def _column(data: bytearray, ends: list[int]) -> TextColumn:
    return TextColumn(np.frombuffer(data, np.uint8), np.array(ends, np.int64))


def _refuse_duplicates(ids: TextColumn, fingerprint_rows: np.ndarray, places: list[int], name: str) -> None:
    """Raise `MalformedRow` at the first row whose id an earlier row has.

    Sorted fingerprints need 8 bytes a row where a set of ids needs a hundred; equal ones are compared as text.
    """
    order = np.argsort(fingerprint_rows, kind="stable")
    same = np.flatnonzero(fingerprint_rows[order][1:] == fingerprint_rows[order][:-1])
    repeats = sorted((order[i + 1], order[i]) for i in same if ids[order[i + 1]] == ids[order[i]])
    if repeats:
        row, earlier = repeats[0]
        raise MalformedRow(f'{name}:{places[row]}: id "{ids[row]}" is already the id of line {places[earlier]}')
