"""Questions from files or from the embedded world, and the endless stream of them that training takes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from memsearcher_jax.agent.types import Problem
from memsearcher_jax.data.world import WorldConfig, make_world
from memsearcher_jax.jsonl import MalformedRow, checked_text, id_field, numbered_lines, parse_object, text_field


@dataclass(frozen=True)
class DataConfig:
    """Where the questions come from. With neither train nor test files, it is the embedded world."""

    train: tuple[str, ...] = ()
    """JSONL files of training questions (FlashRAG layout: id, question, golden_answers), plain or .gz."""
    test: tuple[str, ...] = ()
    """JSONL files of test questions, likewise."""
    malformed: Literal["refuse", "skip"] = "refuse"
    """A row that cannot be used ends the command (refuse), or is left out and counted (skip)."""
    world: WorldConfig = field(default_factory=WorldConfig)
    """The embedded world: its seed and its size."""

    @property
    def embedded(self) -> bool:
        return not (self.train or self.test)


@dataclass(frozen=True)
class Problems:
    """What a run trains and is tested on."""

    train: Sequence[Problem]
    test: Sequence[Problem]
    skipped: tuple[str, ...] = ()  # one line for each row that was left out


def load(config: DataConfig, directory: Path) -> Problems:
    """Read and check every row, and open the questions from a dataset under `directory`, written if it is not there.

    Raises:
      FileNotFoundError, ValueError: one line that names the file, and the line where there is one.
    """
    # Imported here: it takes most of a second, and a config must read quickly.
    from memsearcher_jax.data.builder import store

    skipped: list[str] = []
    if config.embedded:
        world = make_world(config.world)
        splits = {"train": world.train, "test": world.test}
    else:
        refuse = config.malformed == "refuse"
        splits = {
            split: [problem for file in files for problem in read_questions(file, None if refuse else skipped.append)]
            for split, files in (("train", config.train), ("test", config.test))
        }
    stored = store(splits, directory)
    return Problems(stored.get("train", ()), stored.get("test", ()), tuple(skipped))


def read_questions(path: str | Path, skip: Callable[[str], Any] | None = None) -> list[Problem]:
    """Read a JSONL file of FlashRAG question rows: `id`, `question`, `golden_answers`, perhaps `metadata`.

    Args:
      skip: is told, in one line, of each malformed row, which is then left out; without it such a row is an error.

    Raises:
      FileNotFoundError, ValueError: no such file, no usable row, or (`MalformedRow`, with file and line) JSON that
        cannot be read, a field that is missing or of the wrong type, or an id that was there before.
    """
    problems: dict[str, Problem] = {}
    for where, line in numbered_lines(Path(path)):
        try:
            problem = _problem(where, parse_object(where, line))
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


def check_questions(problems: Iterable[Problem], count_tokens: Callable[[str], int], limit: int) -> None:
    """Raise ValueError that names the first question of more than `limit` tokens, and says how many there are."""
    counts = ((problem.id, count_tokens(problem.question)) for problem in problems)
    too_long = [(identity, tokens) for identity, tokens in counts if tokens > limit]
    if too_long:
        identity, tokens = too_long[0]
        such = f" ({len(too_long)} such questions)" if len(too_long) > 1 else ""
        raise ValueError(
            f'question "{identity}" has {tokens} tokens and the budget is {limit}{such}: '
            "raise agent.question_tokens, shorten it or leave it out"
        )


@dataclass(frozen=True)
class ProblemStream:
    """Problems without end: each epoch holds every one once, in an order that (seed, epoch) decides.

    There is no cursor inside. Whoever takes knows the position, and a resumed run goes on from the number it saved.
    """

    problems: Sequence[Problem]
    seed: int

    def __post_init__(self) -> None:
        if not self.problems:
            raise ValueError("there are no problems to draw from: set data.train to a file of questions")

    def take(self, position: int, count: int) -> list[Problem]:
        """The `count` problems from `position` on, counted from the start of the first epoch."""
        size = len(self.problems)
        taken: list[Problem] = []
        while len(taken) < count:
            epoch, start = divmod(position + len(taken), size)
            order = np.random.default_rng((self.seed, epoch)).permutation(size)
            taken += [self.problems[int(row)] for row in order[start : start + count - len(taken)]]
        return taken
