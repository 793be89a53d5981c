"""A corpus on disk: an Arrow file of the id and contents of every passage, and a checksum of the content.

The file is memory-mapped. `pyarrow` is imported where it is used: a config and `--help` do not need it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from memsearcher_jax.canonical import canonical
from memsearcher_jax.jsonl import MalformedRow, id_field, numbered_lines, parse_object, text_field
from memsearcher_jax.types import Passage

CORPUS_FILE = "passages.arrow"
BATCH_ROWS = 10_000  # passages in memory at a time, and between two calls of `on_progress`

Source = Path | Collection[Passage]
"""A JSONL file of `{"id", "contents"}` rows (FlashRAG's layout), plain or `.gz`; or passages that were made."""


def source_name(source: Source) -> str:
    return str(source) if isinstance(source, Path) else "the made corpus"


@dataclass(frozen=True)
class Corpus:
    """Passages by row number; `checksum` depends on the content only, not on the file or its compression."""

    ids: Any  # arrow arrays [R] of UTF-8: texts whose encoding need not be checked when the file is opened
    contents: Any
    checksum: str  # sha256, hexadecimal

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Passage]:
        return map(self.passage, range(len(self)))

    def passage(self, row: int, score: float = 0.0) -> Passage:
        return Passage(self.ids[row].as_py().decode(), self.contents[row].as_py().decode(), score)

    def texts(self, rows: Iterable[int]) -> list[str]:
        return [self.contents[row].as_py().decode() for row in rows]


def read_passages(source: Source) -> Iterator[tuple[str, Passage]]:
    """("source:line", passage) of every row.

    Raises FileNotFoundError, or ValueError, in one line with the file and the line, for a malformed row.
    """
    if not isinstance(source, Path):
        yield from ((f"{source_name(source)}:{row}", passage) for row, passage in enumerate(source, start=1))
        return
    for location, line in numbered_lines(source):
        try:
            row = parse_object(location, line)
            contents = canonical(text_field(location, row, "contents"))  # as golden answers are
            passage = Passage(id_field(location, row), contents)
        except MalformedRow as error:
            example = r'{"id": "7", "contents": "\"Title\"\nText"}'
            raise MalformedRow(f"{error}; a line of a corpus is like {example}") from error
        yield location, passage


def corpus_checksum(source: Source) -> str:
    """The checksum of the passages, in one pass without storing them. Raises as `read_passages` does."""
    digest = hashlib.sha256()
    for _, passage in read_passages(source):
        digest.update(_framed(passage))
    return digest.hexdigest()


def store_corpus(source: Source, directory: Path, on_progress: Callable[[int], None] = lambda rows: None) -> Corpus:
    """Write the passages of a source of any size to a file in `directory`, and return the corpus over it.

    `on_progress` receives the number of rows so far.

    Raises as `read_passages` does, ValueError for an id that occurs twice or no passages, OSError for a full disk.
    """
    import pyarrow

    schema = pyarrow.schema([("ids", pyarrow.large_binary()), ("contents", pyarrow.large_binary())])
    digest = hashlib.sha256()
    rows = 0
    passages = (passage for _, passage in read_passages(source))
    with pyarrow.OSFile(str(directory / CORPUS_FILE), "wb") as file, pyarrow.ipc.new_file(file, schema) as writer:
        while batch := list(islice(passages, BATCH_ROWS)):
            columns = [[passage.id.encode() for passage in batch], [passage.contents.encode() for passage in batch]]
            writer.write_batch(pyarrow.record_batch(columns, schema=schema))
            digest.update(b"".join(map(_framed, batch)))
            rows += len(batch)
            on_progress(rows)
    if not rows:
        raise ValueError(f"{source_name(source)}: contains no passages")
    corpus = open_corpus(directory, digest.hexdigest())
    ids, counts = corpus.ids.value_counts().flatten()
    if len(ids) < rows:
        repeated = ids[int(counts.to_numpy().argmax())].as_py().decode()
        locations = [location for location, passage in read_passages(source) if passage.id == repeated]
        first_line = locations[0].rpartition(":")[2]
        raise MalformedRow(f'{locations[1]}: id "{repeated}" is already the id of line {first_line}')
    return corpus


def open_corpus(directory: Path, checksum: str) -> Corpus:
    """The corpus in `directory`. Raises OSError or ValueError if the file is missing or damaged."""
    import pyarrow

    table = pyarrow.ipc.open_file(pyarrow.memory_map(str(directory / CORPUS_FILE))).read_all()
    table.validate(full=True)  # reads the offsets, beyond which no text may begin
    return Corpus(table["ids"], table["contents"], checksum)


def _framed(passage: Passage) -> bytes:
    """Both texts with their lengths, without which ("ab", "c") and ("a", "bc") would have the same checksum."""
    encoded_id = passage.id.encode()
    encoded_contents = passage.contents.encode()
    lengths = b"%d:%d:" % (len(encoded_id), len(encoded_contents))
    return lengths + encoded_id + encoded_contents
