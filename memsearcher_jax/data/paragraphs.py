"""The paragraphs that HotpotQA, 2WikiMultihopQA and MuSiQue publish with their questions, as the passages of a corpus.

Each question comes with the paragraphs that support its answer and with others that distract. They are in these fields,
of the row or of its `metadata`, and may be JSON text or columns as in parquet:

- `context`: pairs of a title and a list of sentences (HotpotQA, 2WikiMultihopQA), or records of `title` and `sentences`
  or `content` (FlashRAG)
- `paragraphs`: records of `title` and `paragraph_text` (MuSiQue)
- `question_decomposition`: steps with a `support_paragraph` (FlashRAG's MuSiQue, which has no other paragraphs)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from memsearcher_jax.canonical import canonical
from memsearcher_jax.data.readers import read_rows, records
from memsearcher_jax.jsonl import MalformedRow
from memsearcher_jax.types import Passage, Problem

TEXT_FIELDS = ("sentences", "content", "paragraph_text", "text")
PARAGRAPH_FIELDS = ("context", "paragraphs", "question_decomposition")
LARGE_FIELDS = {*PARAGRAPH_FIELDS, "supporting_facts"}
"""Fields of metadata that a question with its supporting titles does not need."""


class Paragraph(NamedTuple):
    title: str
    text: str


@dataclass
class PublishedQuestions:
    """The questions of files, and their paragraphs, each of which is there once."""

    problems: dict[Path, list[Problem]] = field(default_factory=dict)  # by file
    paragraphs: dict[Paragraph, Path] = field(default_factory=dict)  # in order, with the first file that has it
    without_paragraphs: int = 0  # questions
    repeated: int = 0  # paragraphs of questions that were there before

    def passages(self) -> Iterator[tuple[Passage, Path]]:
        """The passages in FlashRAG's layout, and the file that each comes from."""
        for number, (paragraph, file) in enumerate(self.paragraphs.items()):
            yield Passage(str(number), f'"{paragraph.title}"\n{paragraph.text}'), file


def read_published(
    files: list[Path], on_malformed: Callable[[str], object] | None = None, on_file: Callable[[Path], None] = print
) -> PublishedQuestions:
    """Read the questions of all files with their paragraphs.

    A malformed row is an error, or is skipped after `on_malformed` was called with a one-line message.

    Raises as `readers.read_problems`, and ValueError for a file none of whose questions has paragraphs.
    """
    published = PublishedQuestions()
    for file in files:
        on_file(file)
        problems = list[Problem]()
        without_paragraphs = 0
        for row in read_rows(file, on_malformed, extra_columns=PARAGRAPH_FIELDS):
            try:
                paragraphs = _paragraphs(row.where, row.fields)
            except MalformedRow as error:
                if on_malformed is None:
                    raise
                on_malformed(str(error))
                continue
            for paragraph in paragraphs:
                if paragraph in published.paragraphs:
                    published.repeated += 1
                else:
                    published.paragraphs[paragraph] = file
            if not paragraphs:
                without_paragraphs += 1
            small = {name: value for name, value in row.problem.metadata.items() if name not in LARGE_FIELDS}
            if titles := row.problem.supporting_titles:
                small["supporting_titles"] = list(titles)
            problems.append(replace(row.problem, metadata=small))
        if without_paragraphs == len(problems):
            names = ", ".join(PARAGRAPH_FIELDS)
            raise ValueError(f"{file}: its questions come without paragraphs (none of the fields {names})")
        published.problems[file] = problems
        published.without_paragraphs += without_paragraphs
    return published


def _paragraphs(where: str, row: dict[str, Any]) -> list[Paragraph]:
    metadata = row.get("metadata")
    sources = [row, metadata] if isinstance(metadata, dict) else [row]
    found = list[Paragraph]()
    try:
        for source in sources:
            for name in ("context", "paragraphs"):
                found += [_paragraph(record) for record in records(source.get(name))]
            for step in records(source.get("question_decomposition")):
                if isinstance(step, dict) and step.get("support_paragraph"):
                    found.append(_paragraph(step["support_paragraph"]))
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise MalformedRow(f"{where}: its paragraphs have no title and text ({reason:.200})") from error
    return [paragraph for paragraph in found if paragraph.text]


def _paragraph(record: Any) -> Paragraph:
    """A pair of a title and a text, or a record with these fields; the text may be a list of sentences."""
    if isinstance(record, dict):
        title = record["title"]
        given = [record[name] for name in TEXT_FIELDS if record.get(name) is not None]
        text = given[0] if given else ""
    elif isinstance(record, list) and len(record) == 2:
        title, text = record
    else:
        raise TypeError(f"a paragraph is {type(record).__name__}")
    if isinstance(text, list):
        text = " ".join(str(sentence).strip() for sentence in text)
    if not isinstance(title, str) or not isinstance(text, str):
        raise TypeError("a title or a text is no text")
    return Paragraph(" ".join(canonical(title).split()), " ".join(canonical(text).split()))
