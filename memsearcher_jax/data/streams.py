"""Rows of streams for Mem-alpha, as Memalpha and its edition of MemoryAgentBench publish them: `instance_id`, `chunks`
(JSON text of a list of texts), `questions_and_answers` (JSON text of a list of {question, answer}), `data_source`, and
`num_chunks`, `num_questions`. Answers are texts, or in MemoryAgentBench lists of texts. Their field `prompt` is shown
to nobody and not read.
"""

from __future__ import annotations

import json
from typing import Any

from memsearcher_jax.agent.types import Problem, Stream, StreamQuestion
from memsearcher_jax.jsonl import MalformedRow, id_field, text_field

COLUMNS = ("instance_id", "chunks", "questions_and_answers", "data_source", "num_chunks", "num_questions")


def is_stream(row: dict[str, Any]) -> bool:
    """Whether a row is a stream and not a question."""
    return "chunks" in row


def stream_problem(where: str, row: dict[str, Any]) -> Problem:
    """The stream of one row. Raises MalformedRow that begins with `where`."""
    source = text_field(where, row, "data_source")
    chunks = _listed(where, row, "chunks")
    if not all(isinstance(chunk, str) and chunk.strip() for chunk in chunks):
        raise MalformedRow(f'{where}: field "chunks" must be a list of texts, none of them empty')
    asked = tuple(_question(where, entry) for entry in _listed(where, row, "questions_and_answers"))
    for name, held in (("num_chunks", chunks), ("num_questions", asked)):
        if row.get(name) is not None and row[name] != len(held):
            raise MalformedRow(f'{where}: field "{name}" is {row[name]}, but there are {len(held)}')
    identity = id_field(where, {"id": row.get("instance_id")})
    return Stream(source, tuple(map(_clean, chunks)), asked).problem(f"{source}/{identity}")


def _question(where: str, entry: Any) -> StreamQuestion:
    try:
        question, answer = entry["question"], entry["answer"]
    except (KeyError, TypeError) as error:
        raise MalformedRow(f'{where}: every entry of "questions_and_answers" has a question and an answer') from error
    texts = answer if isinstance(answer, list) else [answer]
    if not isinstance(question, str) or not question.strip() or not texts or not all(map(_is_answer, texts)):
        raise MalformedRow(f"{where}: a question must be a text, and its answer a text or a list of texts")
    kind = entry.get("kind", "")
    return StreamQuestion(_clean(question), answer, kind if isinstance(kind, str) else "")


def _is_answer(value: Any) -> bool:
    """Some sets write class numbers as numbers, and several names of one answer as a list within the list."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(text, str) for text in value)
    return isinstance(value, str | int) and not isinstance(value, bool)


def _listed(where: str, row: dict[str, Any], name: str) -> list[Any]:
    """A list that is there as such or as JSON text."""
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise MalformedRow(f'{where}: field "{name}" is no JSON ({error})') from error
    if not isinstance(value, list) or not value:
        raise MalformedRow(f'{where}: field "{name}" must be a list with at least one entry')
    return value


def _clean(text: str) -> str:
    """Without halves of surrogate pairs, which JSON may escape and no encoder accepts."""
    return text.encode("utf-8", "replace").decode("utf-8")
