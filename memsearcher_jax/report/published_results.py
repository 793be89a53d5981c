"""Answers of other programs to the same questions, from the files that they publish.

FlashRAG writes `intermediate_data.json`: a list of items with `question`, `golden_answers` and `output.pred`. Search-R1
runs on verl, which writes validation as JSON Lines with `input` (the prompt as text), `output`, `score` and, in newer
versions, `gts`; its answer is the last `<answer>` of the output. Neither has our ids, so a question is identified by
its text and, where that is repeated, by how often it occurred before. Scores are computed again, with our metrics.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memsearcher_jax.jsonl import MalformedRow, numbered_lines, parse_object
from memsearcher_jax.types import Problem

FLASHRAG_FILE = "intermediate_data.json"
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_QUESTION = re.compile(r"Question:(?!.*Question:)([^\n]*)", re.DOTALL)


@dataclass(frozen=True)
class PublishedAnswer:
    """One row of a file; an answer of None was not given, and golden answers of () are unknown."""

    question: str
    answer: str | None
    golden_answers: tuple[str, ...] = ()


def find_published(path: Path) -> Path | None:
    """The file of published results that `path` names, itself or as its folder; None if it names none."""
    if path.is_dir():
        path = path / FLASHRAG_FILE
    return path if path.is_file() and path.name.endswith((".json", ".jsonl", ".jsonl.gz")) else None


def read_published(file: Path) -> list[PublishedAnswer]:
    """The answers of one file. Raises ValueError that names the file and the row that is neither format."""
    if file.suffix == ".json":
        try:
            rows = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}: not JSON ({error})") from error
        if not isinstance(rows, list):
            raise ValueError(f"{file}: no list of answers: name FlashRAG's {FLASHRAG_FILE}")
        answers = [_flashrag_answer(f"{file}:{number}", row) for number, row in enumerate(rows, start=1)]
    else:
        answers = [_verl_answer(where, parse_object(where, line)) for where, line in numbered_lines(file)]
    if not answers:
        raise ValueError(f"{file}: holds no answers")
    return answers


def question_keys(questions: Iterable[str]) -> Iterator[tuple[str, int]]:
    """(text without case, spaces and final question marks, earlier occurrences) of each question, in order."""
    seen: Counter[str] = Counter()
    for question in questions:
        text = " ".join(question.lower().split()).rstrip(" ?")
        yield text, seen[text]
        seen[text] += 1


def match_problems(answers: Sequence[PublishedAnswer], problems: Sequence[Problem], file: Path) -> list[Problem]:
    """The problem of each answer: one of `problems`, or a new one for a question that is not among them.

    Raises ValueError where a question has other golden answers in the file.
    """
    known = dict(zip(question_keys(problem.question for problem in problems), problems, strict=True))
    matched = []
    for number, (key, row) in enumerate(zip(question_keys(row.question for row in answers), answers, strict=True), 1):
        problem = known.get(key) or Problem(f"{file}:{number}", row.question, row.golden_answers)
        if row.golden_answers and set(row.golden_answers) != set(problem.golden_answers):
            raise ValueError(
                f"{file}: the golden answers of question {row.question!r} are {list(row.golden_answers)} and not "
                f"{list(problem.golden_answers)}: compare evaluations of the same data"
            )
        matched.append(problem)
    return matched


def _flashrag_answer(where: str, row: Any) -> PublishedAnswer:
    try:
        question, golden, answer = row["question"], row["golden_answers"], row["output"]["pred"]
    except (KeyError, TypeError, IndexError) as error:
        raise MalformedRow(f"{where}: no question, golden_answers and output.pred: not a file of FlashRAG") from error
    return PublishedAnswer(_text(where, question), _text(where, answer), _golden(where, golden))


def _verl_answer(where: str, row: dict[str, Any]) -> PublishedAnswer:
    prompt, output = (_text(where, row.get(name)) for name in ("input", "output"))
    found = _QUESTION.search(prompt)
    if found is None:
        raise MalformedRow(f'{where}: no "Question:" in the input: not a validation file of Search-R1')
    answers, golden = _ANSWER.findall(output), row.get("gts")
    golden = golden.get("target") if isinstance(golden, dict) else golden
    answer = answers[-1].strip() if answers else None
    return PublishedAnswer(found[1].strip(), answer, () if golden is None else _golden(where, golden))


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise MalformedRow(f"{where}: {value!r} is not text: not a file of FlashRAG or Search-R1")
    return value


def _golden(where: str, value: Any) -> tuple[str, ...]:
    return tuple(_text(where, answer) for answer in (value if isinstance(value, list) else [value]))
