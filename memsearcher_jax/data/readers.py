"""Readers of problem files: JSON Lines, a list in `.json`, or parquet.

- Questions as FlashRAG publishes them: `id`, `question`, `golden_answers` and optionally `metadata`.
- Questions as Search-R1 and the original MemSearcher write them: the answers may be in `reward_model`, one of them or
  a JSON list as a text, `data_source` names the dataset of a row, and a row without an `id` is named by the `split` and
  the `index` of its `extra_info`, or by its number.
- Questions as HotpotQA, 2WikiMultihopQA and MuSiQue publish them: `answer`, with `answer_aliases`, and the titles of
  `supporting_facts`, or of the `paragraphs` that support the answer; in FlashRAG's MuSiQue those of the steps in
  `question_decomposition`. The other texts of a row are not read here, see `paragraphs`.
- Questions about a long text as MemAgent publishes them (parquet, `eval_50.json`): the text is `context`, the question
  `question`, `input`, or the content of the first message of `prompt`; the answers are `answers`, or in `reward_model`.
- Streams as Memalpha and its edition of MemoryAgentBench publish them: `instance_id`, `chunks` (a JSON list of texts),
  `questions_and_answers` (a JSON list of {question, answer}) and `data_source`. Their field `prompt` is not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memsearcher_jax.canonical import canonical
from memsearcher_jax.data.conversations import conversation_problem
from memsearcher_jax.jsonl import MalformedRow, checked_text, id_field, numbered_lines, parse_object, text_field
from memsearcher_jax.types import Problem, Stream, StreamQuestion

PARQUET_COLUMNS = {
    *("id", "question", "golden_answers", "metadata", "data_source", "reward_model", "extra_info"),
    *("instance_id", "chunks", "questions_and_answers"),
    *("context", "prompt", "input", "answers", "index"),
    *("_id", "answer", "answer_aliases", "supporting_facts", "paragraphs"),
}


CHUNK_WORDS = 640
"""Words of a chunk of a conversation, at most. With four tokens for each it fits Mem-alpha's 2,560 tokens."""


@dataclass(frozen=True)
class ProblemRow:
    """A row of a file."""

    where: str  # "file:line"
    fields: dict[str, Any]  # as published
    problem: Problem


def read_problems(
    path: str | Path, on_malformed: Callable[[str], object] | None = None, chunk_words: int = CHUNK_WORDS
) -> list[Problem]:
    """Read every row of a file of questions, streams or conversations: JSON Lines, `.parquet`, or a list in `.json`.

    A malformed row is an error, or is skipped after `on_malformed` was called with a one-line message. A chunk of a
    conversation has at most `chunk_words` words.

    Raises:
      FileNotFoundError: the file does not exist.
      MalformedRow: a row cannot be parsed, lacks a field or repeats an id; the message names the file and the line.
      ValueError: the file holds no usable row, or is damaged.
    """
    return [row.problem for row in read_rows(Path(path), on_malformed, chunk_words)]


def read_rows(
    path: Path,
    on_malformed: Callable[[str], object] | None = None,
    chunk_words: int = CHUNK_WORDS,
    extra_columns: Collection[str] = (),
) -> Iterator[ProblemRow]:
    """The rows of a file one after the other; `extra_columns` of parquet are read, too. Raises as `read_problems`."""
    ids = set[str]()
    if path.suffix == ".parquet":
        rows: Iterator[tuple[str, Any]] = parquet_rows(path, PARQUET_COLUMNS | set(extra_columns))
    else:
        rows = _json_rows(path) if path.suffix == ".json" else numbered_lines(path)
    for where, row in rows:
        try:
            fields = parse_object(where, row) if isinstance(row, bytes) else row
            problem = _problem(where, fields, path, chunk_words)
            if problem.id in ids:
                raise MalformedRow(f'{where}: id "{problem.id}" occurs twice')
        except MalformedRow as error:
            if on_malformed is None:
                raise
            on_malformed(str(error))
            continue
        ids.add(problem.id)
        yield ProblemRow(where, fields, problem)
    if not ids:
        raise ValueError(f"{path}: holds no questions")


def with_source(problem: Problem, source: str) -> Problem:
    """The problem with its dataset's name in the metadata and in front of the id: datasets reuse each other's ids.

    A stream has both already.
    """
    if problem.stream:
        return problem
    return replace(problem, id=f"{source}/{problem.id}", metadata={**problem.metadata, "source": source})


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """("file, entry number", entry) of every entry of a list.

    Other files are JSON Lines, as Hugging Face's datasets writes them.
    """
    lines = list(numbered_lines(path))
    content = b"".join(line for _, line in lines)
    if not content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        yield from lines
        return
    try:
        entries = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    yield from ((f"{path}, entry {number}", entry) for number, entry in enumerate(entries, start=1))


def parquet_rows(path: Path, names: Container[str] = PARQUET_COLUMNS) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file:row", row of those columns that have one of the names) of every row, counted from 1.

    Raises FileNotFoundError or ValueError, in one line, for no file or a damaged one.
    """
    import pyarrow as pa  # imported here because it is slow to import and rarely needed
    from pyarrow import parquet

    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in names]
            for batch in file.iter_batches(1_024, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not a readable parquet file after row {number} ({reason})") from error


def _problem(where: str, fields: Any, path: Path, chunk_words: int) -> Problem:
    if not isinstance(fields, dict):
        raise MalformedRow(f"{where}: a JSON object is needed, found {type(fields).__name__}")
    if isinstance(fields.get("context"), str) and "supporting_facts" not in fields:
        return _text_problem(where, fields, path.stem)
    if "haystack_sessions" in fields or isinstance(fields.get("conversation"), dict):
        return conversation_problem(where, fields, chunk_words, path.stem)
    return _stream_problem(where, fields) if "chunks" in fields else _question_problem(where, fields)


def _text_problem(where: str, row: dict[str, Any], name: str) -> Problem:
    """A question about a text. The source of an evaluation file is its name, which says the length of its texts."""
    prompt = row.get("prompt")
    message = prompt[0] if isinstance(prompt, list) and prompt else prompt
    content = message.get("content") if isinstance(message, dict) else message
    question = _first_given(row.get("question"), row.get("input"), content)
    problem = _question_problem(where, row | {"question": question, "data_source": None})
    text = canonical(checked_text(where, "context", row["context"]))
    source = f"ruler_hqa_{name.removeprefix('eval_')}" if name.startswith("eval_") else name
    return replace(with_source(problem, source), stream=Stream(source, (text,), ()))


def _question_problem(where: str, row: dict[str, Any]) -> Problem:
    """A question. Its answers and its id are where FlashRAG, Search-R1, MemAgent or the benchmarks write them."""
    field, answers = _answers(where, row)
    metadata = row.get("metadata")
    if not isinstance(metadata, dict | None):
        raise MalformedRow(f'{where}: field "metadata" must be an object, found {type(metadata).__name__}')
    metadata = {name: value for name, value in (metadata or {}).items() if name != "objectives"}  # of joined questions
    titles = _supporting_titles(where, row) if field == "answer" else _titles_of_steps(metadata)
    if titles:
        metadata = {"supporting_titles": titles} | metadata
    stated = metadata.get("supporting_titles")
    if isinstance(stated, list):  # as titles of passages are written
        metadata["supporting_titles"] = [canonical(title) if isinstance(title, str) else title for title in stated]
    if "question" not in row:
        raise MalformedRow(f'{where}: no field "question": it holds the question alone, without a template')
    problem = Problem(
        id=_question_id(where, row),
        question=text_field(where, row, "question"),
        golden_answers=tuple(canonical(checked_text(where, field, answer)) for answer in answers),
        metadata=metadata,
    )
    try:
        json.dumps(metadata, allow_nan=False)  # parquet has dates, and Python reads NaN
        _ = problem.supporting_titles
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedRow(f'{where}: field "metadata": {str(error)[:500]}') from error
    source = row.get("data_source")
    return problem if source is None else with_source(problem, checked_text(where, "data_source", source))


def _answers(where: str, row: dict[str, Any]) -> tuple[str, list[Any]]:
    """The name of the field that holds the answers, and its list, not yet checked to be texts."""
    truth = _object(row, "reward_model").get("ground_truth")
    fields = {name: row.get(name) for name in ("golden_answers", "answers", "answer")}
    fields["reward_model.ground_truth"] = truth.get("target") if isinstance(truth, dict) else truth
    given = [name for name, value in fields.items() if value is not None]
    field = given[0] if given else "golden_answers"
    answers = fields[field]
    if isinstance(answers, str):  # one answer, or a list as tables hold it
        is_list = re.match(r"\[\s*[\"']", answers)
        answers = _list_field(where, fields, field) if is_list else [answers]
    if not isinstance(answers, list) or not answers:
        raise MalformedRow(f'{where}: field "{field}" must be a list with at least one answer')
    if field == "answer" and row.get("answer_aliases"):
        answers = [*answers, *_list_field(where, row, "answer_aliases")]
    return field, answers


def _question_id(where: str, row: dict[str, Any]) -> str:
    """The id of a row, or one made of its split and its number."""
    if row.get("id") is not None:
        return id_field(where, row)
    extra = _object(row, "extra_info")
    row_number = re.findall(r"\d+", where)[-1]
    number = _first_given(row.get("_id"), row.get("index"), extra.get("index"), row_number)
    made = f"{extra['split']}_{number}" if extra.get("split") else str(number)
    return id_field(where, {"id": made})


def _object(row: dict[str, Any], name: str) -> dict[str, Any]:
    """The object in the field `name`; empty if the field is absent or holds something else."""
    value = row.get(name)
    return value if isinstance(value, dict) else {}


def _first_given(*values: Any) -> Any:
    """The first value that is not None; None if there is none."""
    given = [value for value in values if value is not None]
    return given[0] if given else None


def _supporting_titles(where: str, row: dict[str, Any]) -> list[Any]:
    """Titles in pairs with a sentence, or of records, and those of paragraphs; each of them once."""
    titles = []
    try:
        for fact in records(row.get("supporting_facts")):
            if not isinstance(fact, dict | list):  # of a text, 0 would be its first letter
                raise TypeError(f"a supporting fact is {type(fact).__name__}")
            titles.append(fact["title"] if isinstance(fact, dict) else fact[0])
        for paragraph in records(row.get("paragraphs")):
            if isinstance(paragraph, dict) and paragraph.get("is_supporting"):
                titles.append(paragraph["title"])
        return list(dict.fromkeys(titles))
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise MalformedRow(f"{where}: supporting_facts or paragraphs name no titles ({reason:.200})") from error


def _titles_of_steps(metadata: dict[str, Any]) -> list[str]:
    """The titles of the paragraphs that support the steps of a question, as FlashRAG writes them for MuSiQue."""
    steps = metadata.get("question_decomposition")
    titles = list[str]()
    for step in steps if isinstance(steps, list) else ():
        paragraph = step.get("support_paragraph") if isinstance(step, dict) else None
        if isinstance(paragraph, dict) and isinstance(paragraph.get("title"), str):
            titles.append(paragraph["title"])
    return list(dict.fromkeys(titles))


def records(value: Any) -> Any:
    """A list, given as one, as JSON text or as columns, in which Hugging Face's datasets stores records; else []."""
    if isinstance(value, str):
        value = json.loads(value) if value.startswith(("[", "{")) else []
    if isinstance(value, dict):
        columns = [column or () for column in value.values()]
        return [dict(zip(value, record, strict=True)) for record in zip(*columns, strict=True)]
    return value or []


def _stream_problem(where: str, row: dict[str, Any]) -> Problem:
    source = text_field(where, row, "data_source")
    chunks = _list_field(where, row, "chunks")
    if not all(isinstance(chunk, str) and chunk.strip() for chunk in chunks):
        raise MalformedRow(f'{where}: field "chunks" must be a list of texts, none of them empty')
    questions = tuple(_stream_question(where, entry) for entry in _list_field(where, row, "questions_and_answers"))
    instance = id_field(where, row, "instance_id")
    stream = Stream(source, tuple(map(canonical, chunks)), questions)
    return Problem.of_stream(f"{source}/{instance}", stream)


def _stream_question(where: str, entry: Any) -> StreamQuestion:
    fields = entry if isinstance(entry, dict) else {}
    question = fields.get("question")
    answer = fields.get("answer")
    kind = fields.get("kind")
    answers = answer if isinstance(answer, list) else [answer]
    has_answer = bool(answers) and all(map(_is_answer, answers))
    if not isinstance(question, str) or not question.strip() or not has_answer:
        raise MalformedRow(f'{where}: "question" must be a text, and its "answer" a text or a list of texts')
    return StreamQuestion(canonical(question), _valid(answer), kind if isinstance(kind, str) else "")


def _is_answer(value: Any) -> bool:
    """Some datasets write class labels as numbers, and the aliases of one answer as a nested list."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(text, str) for text in value)
    return isinstance(value, str | int) and not isinstance(value, bool)


def _list_field(where: str, row: dict[str, Any], name: str) -> list[Any]:
    """A non-empty list, given as a list or as JSON text."""
    value = row.get(name)
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise MalformedRow(f'{where}: field "{name}" is not JSON ({error})') from error
    if not isinstance(value, list) or not value:
        raise MalformedRow(f'{where}: field "{name}" must be a list with at least one entry')
    return value


def _valid(value: Any) -> Any:
    """`canonical` of a text, or of the texts of a list."""
    if isinstance(value, list):
        return list(map(_valid, value))
    return canonical(value) if isinstance(value, str) else value
