"""Turns a folder of Markdown, text, HTML and PDF files into a corpus of passages, to be indexed and searched.

python launch/build_corpus.py DIR --out passages.jsonl
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import track

from memsearcher_jax.launch import cli, outputs
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.ranges import Count
from memsearcher_jax.retrieval.documents import (
    DOCUMENT_LIBRARIES,
    READERS,
    WORD,
    UnreadableDocument,
    find_documents,
    read_passages,
)


@dataclass(frozen=True)
class BuildCorpus:
    """Turn a folder of documents into a corpus of passages."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """Folder of Markdown, text, HTML and PDF files; subfolders are read too, hidden files are not."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("passages.jsonl")
    """File to write; it must be new. launch/build_index.py reads it."""
    max_words: Count = 100
    """Maximum words of a passage. A passage ends where a sentence ends, and never crosses a heading."""
    malformed: Literal["error", "skip"] = "error"
    """What a document that cannot be read does: end the command, or be skipped and counted."""
    json: cli.File = None
    """Also write the result to this file, as JSON."""


def main(argv: Sequence[str]) -> None:
    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it reports each oddity of a PDF
    with cli.one_line_errors():
        flags = cli.parse_flags(BuildCorpus, argv)
        check(flags)
        outputs.write_json(flags.json, build(flags))


def check(flags: BuildCorpus) -> None:
    """Raises ValueError or OSError."""
    if not flags.folder.is_dir():
        raise NotADirectoryError(f"{flags.folder}: no such directory")
    outputs.require_new_file(flags.out)
    cli.require_extra("documents", *DOCUMENT_LIBRARIES)


def build(flags: BuildCorpus) -> dict[str, object]:
    """Writes the corpus and returns the numbers that it prints."""
    documents, others = find_documents(flags.folder)
    if not documents:
        raise ValueError(f"{flags.folder}: contains no documents ({', '.join(READERS)})")
    rows, skipped = [], []
    for document in track(documents, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()):
        try:
            rows += read_passages(flags.folder, document, flags.max_words)
        except UnreadableDocument as error:
            if flags.malformed == "error":
                raise UnreadableDocument(f"{error}; --malformed skip leaves such documents out") from error
            skipped.append(str(error))
    if not rows:
        raise ValueError("; ".join([f"{flags.folder}: its documents contain no text", *skipped[:1]]))
    atomic_write(flags.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    for line in skipped:
        print(f"skipped {line}", file=sys.stderr)
    if others:
        suffixes = Counter(path.suffix or path.name for path in others).most_common()
        counts = ", ".join(f"{count} {suffix}" for suffix, count in suffixes)
        print(f"ignored {len(others)} files of other formats: {counts}", file=sys.stderr)
    read = len(documents) - len(skipped)
    words = statistics.median(len(WORD.findall(row["contents"].partition("\n")[2])) for row in rows)
    print(
        f"{flags.out}: {len(rows):,} passages of {read:,} documents, median {words:g} words; "
        f"index them with launch/build_index.py --retrieval.corpus {flags.out} --out DIR"
    )
    return {"passages": len(rows), "documents": read, "skipped": skipped, "median_words": words}


if __name__ == "__main__":
    cli.run(main)
