"""Makes a corpus of passages, to be indexed and searched: of a folder of documents, or of published questions.

python launch/build_corpus.py DIR --out passages.jsonl
python launch/build_corpus.py --questions hotpot_dev_distractor_v1.json --out hotpot.jsonl
"""

from __future__ import annotations

if __name__ == "__main__":
    import memsearcher_jax.launch.__main__  # noqa: F401  (runs `main` below)

import gzip
import json
import logging
import os
import shlex
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import track

from memsearcher_jax.data.documents import (
    DOCUMENT_LIBRARIES,
    READERS,
    FolderReading,
    UnreadableDocument,
    find_documents,
    passages,
    read_document,
)
from memsearcher_jax.data.sentences import WORD
from memsearcher_jax.jsonl import numbered_lines, parse_object
from memsearcher_jax.launch import cli, outputs, preconditions, question_corpus
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.ranges import Count

MAX_WORDS = 100  # of a passage, as in the paper's Wikipedia


@dataclass(frozen=True)
class BuildCorpus:
    """Make a corpus of passages of a folder of documents, or of the paragraphs that come with published questions."""

    folder: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="DIR")] = None
    """Folder of Markdown, text, HTML, PDF, Word, PowerPoint and EPUB files; subfolders are read too, hidden files are
    not."""
    questions: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE"), cli.IS_PATH] = ()
    """Instead of DIR: files of HotpotQA, 2WikiMultihopQA or MuSiQue, as their authors, FlashRAG or the Hub publish them
    (.json, .jsonl, .parquet; hf://datasets/OWNER/NAME/FILE). The paragraphs of their questions become the passages, and
    the questions are written beside --out, without them."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("passages.jsonl")
    """File to write, which launch/build_index.py reads. One that this command wrote before is replaced, and compared
    with the new one."""
    max_words: Count | None = None
    """Maximum words of a passage of a document, 100 unless given. A passage ends where a sentence ends, and never
    crosses a heading."""
    malformed: Literal["error", "skip"] = "error"
    """What documents or rows that cannot be read do: end the command, or be counted and left out."""
    json: cli.File = None
    """Also write the result to this file, as JSON."""


def main(argv: Sequence[str]) -> None:
    logging.getLogger("pypdfium2").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="memsearcher_jax.data")  # bs4 reports each oddity of a page
    with cli.one_line_errors():
        flags = cli.parse_flags(BuildCorpus, argv)
        check(flags)
        earlier = earlier_texts(flags.out)
        if flags.folder:
            preconditions.require_extra("documents", *DOCUMENT_LIBRARIES)
            result = build(flags.folder, flags, earlier)
        else:
            # bm25s imports JAX, which would otherwise claim this host's accelerators.
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
            result = build_of_questions(flags, earlier)
        outputs.write_json(flags.json, result)


def check(flags: BuildCorpus) -> None:
    """Raises ValueError or OSError, in one line, for flags that contradict each other."""
    if bool(flags.folder) == bool(flags.questions):
        raise ValueError("give either a folder of documents, or --questions FILE")
    if flags.questions and flags.max_words is not None:
        raise ValueError("--max_words is of documents; paragraphs of --questions are passages as they are: omit it")
    if flags.folder and not flags.folder.is_dir():
        reason = "is a file: give the directory that contains it" if flags.folder.is_file() else "no such directory"
        raise NotADirectoryError(f"{flags.folder}: {reason}")
    outputs.require_writable(flags.out, "--out")


def earlier_texts(file: Path) -> Counter[str] | None:
    """The texts of the passages that this command wrote to `file` before; None if the file does not exist.

    Raises FileExistsError for any other file, which is not replaced.
    """
    if not file.exists():
        return None
    texts = Counter[str]()
    try:
        for where, line in numbered_lines(file):
            row = parse_object(where, line)
            if "source" not in row["metadata"]:
                raise KeyError("source")
            texts[row["contents"]] += 1
    except (ValueError, KeyError, TypeError) as error:
        reason = "is not a corpus that this command wrote: choose another file, or delete it"
        raise FileExistsError(f"--out {file} exists and {reason}") from error
    return texts


def build_of_questions(flags: BuildCorpus, earlier: Counter[str] | None) -> dict[str, object]:
    """Writes the corpus of the paragraphs of questions, and returns the numbers that it prints."""
    published = question_corpus.read(flags.questions, flags.malformed)
    rows = question_corpus.corpus_rows(published)
    write_corpus(flags.out, rows)
    kept = compare(rows, earlier)
    files = question_corpus.write_questions(published, flags.out)
    result = question_corpus.verdict(published, flags.out)
    names = " ".join(shlex.quote(str(file)) for file in files)
    print(
        f"{flags.out}: {len(rows):,} passages of {result['questions']:,} questions; train with "
        f"--retrieval.corpus {shlex.quote(str(flags.out))} --data.train {names}"
    )
    numbers = {"passages": len(rows), "without_paragraphs": published.without_paragraphs}
    return {**numbers, "repeated_paragraphs": published.repeated, **result, **kept}


def build(folder: Path, flags: BuildCorpus, earlier: Counter[str] | None) -> dict[str, object]:
    """Writes the corpus of a folder of documents, and returns the numbers that it prints."""
    paths, other_files = find_documents(folder)
    if not paths:
        raise ValueError(f"{folder}: contains no documents ({', '.join(READERS)})")
    reading = FolderReading()
    for path in track(paths, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()):
        try:
            document = read_document(path)
            rows = passages(folder, path, document, flags.max_words or MAX_WORDS)
        except (OSError, UnreadableDocument) as error:
            reading.unreadable.append(str(error))
        else:
            reading.add(path, document, rows)
    for line in reading.lines(other_files):
        print(line, file=sys.stderr)
    if reading.unreadable and flags.malformed == "error":
        raise UnreadableDocument(
            f"{len(reading.unreadable)} of {len(paths)} documents cannot be read (listed above): "
            "mend them, or leave them out with --malformed skip"
        )
    if not reading.rows:
        raise ValueError(f"{folder}: its documents contain no text")
    write_corpus(flags.out, reading.rows)
    kept = compare(reading.rows, earlier)
    read = len(paths) - len(reading.unreadable) - len(reading.empty)
    words = statistics.median(len(WORD.findall(row["contents"].partition("\n")[2])) for row in reading.rows)
    print(
        f"{flags.out}: {len(reading.rows):,} passages of {read:,} documents, median {words:g} words; "
        f"index them with launch/build_index.py --retrieval.corpus {shlex.quote(str(flags.out))} --out DIR"
    )
    return {
        "passages": len(reading.rows),
        "documents": read,
        "skipped": reading.unreadable,
        "empty": reading.empty,
        "partly_empty": reading.partly_empty,
        "left_out": dict(reading.parts),
        "median_words": words,
        **kept,
    }


def write_corpus(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the rows as JSON Lines, compressed if the file's name ends in .gz."""
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    # Without a time the same passages are the same bytes.
    atomic_write(file, gzip.compress(content, mtime=0) if file.suffix == ".gz" else content)


def compare(rows: Sequence[Mapping[str, Any]], earlier: Counter[str] | None) -> dict[str, int]:
    """Says how many passages have the text of one in the file before, and returns the numbers."""
    if earlier is None:
        return {}
    texts = Counter(row["contents"] for row in rows)
    kept = (texts & earlier).total()
    new = texts.total() - kept
    removed = earlier.total() - kept
    print(f"{kept:,} passages are as before, {new:,} are new, and {removed:,} are no longer there")
    return {"kept": kept, "new": new, "removed": removed}
