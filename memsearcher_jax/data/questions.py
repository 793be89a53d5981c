"""Rows of files: questions in JSON Lines as FlashRAG has them and in parquet as Search-R1 writes it, and streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from memsearcher_jax.agent.types import Problem
from memsearcher_jax.data import streams
from memsearcher_jax.jsonl import MalformedRow, checked_text, id_field, numbered_lines, parse_object, text_field

PARQUET_COLUMNS = ("id", "question", "golden_answers", "metadata", "data_source", "reward_model")
READ = {*PARQUET_COLUMNS, *streams.COLUMNS}


def read_questions(path: str | Path, skip: Callable[[str], Any] | None = None) -> list[Problem]:
    """Read the question rows of a file: `id`, `question`, `golden_answers`, perhaps `metadata`.

    A row with `chunks` is a stream (see data/streams.py) that becomes a problem by `agent.types.Stream.problem`.
    A name that ends in `.parquet` is read as Search-R1's training data: its answers may stand in `reward_model`, and
    `data_source` goes in front of the id, for the ids of the sets that it mixes are the same.

    Args:
      skip: is told, in one line, of each malformed row, which is then left out; without it such a row is an error.

    Raises:
      FileNotFoundError, ValueError: no such file, no usable row, or (`MalformedRow`, with file and line) a row that
        cannot be read, a field that is missing or of the wrong type, or an id that was there before.
    """
    path = Path(path)
    problems: dict[str, Problem] = {}
    for where, read in _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path):
        try:
            problem = read()
            if problem.id in problems:
                raise MalformedRow(f'{where}: id "{problem.id}" occurs twice')
        except MalformedRow as error:
            if skip is None:
                raise
            skip(str(error))
            continue
        problems[problem.id] = problem
    if not problems:
        raise ValueError(f"{path}: holds no questions")
    return list(problems.values())


Row = tuple[str, Callable[[], Problem]]  # where it stands, and what reads it or raises MalformedRow


def _json_rows(path: Path) -> Iterator[Row]:
    for where, line in numbered_lines(path):
        yield where, lambda where=where, line=line: _row(where, parse_object(where, line))


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow as pa  # here, for it takes long and few need it
    from pyarrow import parquet

    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in READ]
            rows = (row for batch in file.iter_batches(columns=columns) for row in batch.to_pylist())
            read = streams.stream_problem if "chunks" in columns else _search_r1_problem
            for number, row in enumerate(rows, start=1):
                where = f"{path}:{number}"
                yield where, partial(read, where, row)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: is no parquet file that can be read after row {number} ({reason})") from error


def _row(where: str, row: dict[str, Any]) -> Problem:
    return streams.stream_problem(where, row) if streams.is_stream(row) else _problem(where, row)


def _search_r1_problem(where: str, row: dict[str, Any]) -> Problem:
    source, reward = row.pop("data_source", None), row.pop("reward_model", None)
    if row.get("golden_answers") is None and isinstance(reward, dict):
        truth = reward.get("ground_truth")
        row["golden_answers"] = truth.get("target") if isinstance(truth, dict) else truth
    problem = _problem(where, row)
    return of_source(checked_text(where, "data_source", source), problem) if source is not None else problem


def _problem(where: str, row: dict[str, Any]) -> Problem:
    answers = row.get("golden_answers")
    if not isinstance(answers, list) or not answers:
        raise MalformedRow(f'{where}: field "golden_answers" must be a list with at least one answer')
    metadata = row.get("metadata")
    if not isinstance(metadata, dict | None):
        raise MalformedRow(f'{where}: field "metadata" must be an object, found {type(metadata).__name__}')
    return Problem(
        id=id_field(where, row),
        question=text_field(where, row, "question"),
        golden_answers=tuple(checked_text(where, "golden_answers", answer) for answer in answers),
        metadata=metadata or {},
    )


def of_source(name: str, problem: Problem) -> Problem:
    """The problem under an id that no other set has, with the set's name in its metadata."""
    return Problem(
        f"{name}/{problem.id}", problem.question, problem.golden_answers, {**problem.metadata, "source": name}
    )
