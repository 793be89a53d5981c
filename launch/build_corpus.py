"""Turns a folder of Markdown, text, HTML and PDF files into a corpus of passages, to be indexed and searched.

python launch/build_corpus.py DIR --out passages.jsonl
"""

from __future__ import annotations

if __name__ == "__main__":
    import memsearcher_jax.launch.__main__  # noqa: F401  (runs `main` below)

import gzip
import json
import logging
import shlex
import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import track

from memsearcher_jax.data.documents import (
    DOCUMENT_LIBRARIES,
    READERS,
    WORD,
    UnreadableDocument,
    find_documents,
    read_passages,
)
from memsearcher_jax.launch import cli, outputs, preconditions
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.ranges import Count


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
    """What documents that cannot be read do: end the command after all are listed, or be listed and left out."""
    json: cli.File = None
    """Also write the result to this file, as JSON."""


def main(argv: Sequence[str]) -> None:
    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it reports each oddity of a PDF
    warnings.filterwarnings("ignore", module="memsearcher_jax.data.documents")  # and bs4 those of HTML
    with cli.one_line_errors():
        flags = cli.parse_flags(BuildCorpus, argv)
        if not flags.folder.is_dir():
            reason = "is a file: give the directory that contains it" if flags.folder.is_file() else "no such directory"
            raise NotADirectoryError(f"{flags.folder}: {reason}")
        outputs.require_new_file(flags.out)
        preconditions.require_extra("documents", *DOCUMENT_LIBRARIES)
        outputs.write_json(flags.json, build(flags))


def build(flags: BuildCorpus) -> dict[str, object]:
    """Writes the corpus and returns the numbers that it prints."""
    documents, left_out = find_documents(flags.folder)
    if not documents:
        raise ValueError(f"{flags.folder}: contains no documents ({', '.join(READERS)})")
    rows, unreadable, empty = list[dict[str, object]](), list[str](), list[str]()
    for document in track(documents, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()):
        try:
            passages = read_passages(flags.folder, document, flags.max_words)
        except (OSError, UnreadableDocument) as error:
            unreadable.append(str(error))
        else:
            rows += passages
            if not passages:
                empty.append(str(document))
    lines = [f"cannot read {line}" for line in unreadable] + [f"without text: {line}" for line in empty]
    for reason, paths in left_out.items():
        names = [path.name for path in paths[:3]] + ["..."] * (len(paths) > 3)
        lines.append(f"left out, {reason}: {len(paths)} ({', '.join(names)})")
    print(*lines, sep="\n", end="\n" if lines else "", file=sys.stderr)
    if unreadable and flags.malformed == "error":
        raise UnreadableDocument(
            f"{len(unreadable)} of {len(documents)} documents cannot be read (listed above): "
            "mend them, or leave them out with --malformed skip"
        )
    if not rows:
        raise ValueError(f"{flags.folder}: its documents contain no text")
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    atomic_write(flags.out, gzip.compress(content) if flags.out.suffix == ".gz" else content)
    read = len(documents) - len(unreadable) - len(empty)
    words = statistics.median(len(WORD.findall(str(row["contents"]).partition("\n")[2])) for row in rows)
    print(
        f"{flags.out}: {len(rows):,} passages of {read:,} documents, median {words:g} words; "
        f"index them with launch/build_index.py --retrieval.corpus {shlex.quote(str(flags.out))} --out DIR"
    )
    return {"passages": len(rows), "documents": read, "skipped": unreadable, "empty": empty, "median_words": words}
