"""Kinds of questions, names in texts, and splits of questions that share no entity."""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Literal

from memsearcher_jax.types import Problem, plain_title

QuestionKind = Literal["all", "span", "choice"]
"""choice: the answer is yes, no or one of the options in the question. span: any other, which takes a search."""

_OPTIONS = re.compile(r"(?:, |^Was )(.+?),? or |(?:out of |^Between )(.+?) and ")


def of_kind(problem: Problem, kind: QuestionKind) -> bool:
    """Whether the question is of this kind. Choices can be guessed: a rule without a model gets many of them right."""
    answers, question = problem.golden_answers, problem.question
    guessable = [_fold(answer).strip() in ("yes", "no") or find_name(answer, question) for answer in answers]
    choice = bool(guessable) and all(guessable)  # an alias of Norway is "no"
    return kind == "all" or choice == (kind == "choice")


def guess(problem: Problem) -> str:
    """The answer of a rule that reads no passage: the first option that the question offers, or yes."""
    options = _OPTIONS.search(problem.question)
    return options[options.lastindex or 0] if options else "yes"


def find_name(name: str, text: str) -> str:
    """The first occurrence of the name in the text, as written there; "" if there is none.

    Case, accents and punctuation may differ.
    """
    words = re.findall(r"\w+", _fold(name))
    pattern = r"(?<!\w)" + r"\W{1,3}".join(words) + (r"\)" if name.endswith(")") else r"(?!\w)")
    match = re.search(pattern, _fold(text)) if words else None
    return text[match.start() : match.end()] if match else ""


def find_title(title: str, text: str) -> str:
    """The first occurrence of a page's title, or else of the title without its parenthesis or without what follows a
    comma; "" if there is none."""
    bare = plain_title(title)
    return find_name(title, text) or find_name(bare, text) or find_name(bare.partition(",")[0], text)


def split(problems: Sequence[Problem], sizes: Sequence[int], seed: int) -> list[list[Problem]]:
    """Splits of at least these sizes, and the rest. Questions that share an entity or a text are in the same split.

    Raises ValueError if there are too few questions.
    """
    groups = _connected(problems)
    random.Random(seed).shuffle(groups)
    splits: list[list[Problem]] = []
    for size in sizes:
        splits.append([])
        while len(splits[-1]) < size:
            if not groups:
                raise ValueError(f"{len(problems)} questions are too few for splits of {', '.join(map(str, sizes))}")
            splits[-1] += groups.pop()
    return [*splits, [problem for group in groups for problem in group]]


def check_disjoint(train: Iterable[Problem], test: Iterable[Problem]) -> None:
    """Raises ValueError, in one line, if a test question shares its text or an entity with a training question."""
    known = {key: problem.id for problem in train for key in _keys(problem)}
    for problem in test:
        for key in _keys(problem):
            if key in known:
                raise ValueError(
                    f'test question "{problem.id}" and training question "{known[key]}" share "{key}": make disjoint '
                    "files with launch/split_questions.py"
                )


def without_shared(problems: Iterable[Problem], others: Iterable[Problem]) -> list[Problem]:
    """The problems that share neither their text nor an entity with `others`."""
    known = {key for problem in others for key in _keys(problem)}
    return [problem for problem in problems if not known & _keys(problem)]


def _connected(problems: Sequence[Problem]) -> list[list[Problem]]:
    """The connected components of the questions, where a common key connects."""
    root = list(range(len(problems)))

    def find(index: int) -> int:
        while root[index] != index:
            root[index] = index = root[root[index]]
        return index

    first: dict[str, int] = {}
    for index, problem in enumerate(problems):
        for key in _keys(problem):
            root[find(index)] = find(first.setdefault(key, index))
    groups: dict[int, list[Problem]] = {}
    for index, problem in enumerate(problems):
        groups.setdefault(find(index), []).append(problem)
    return list(groups.values())


def _keys(problem: Problem) -> set[str]:
    return {" ".join(re.findall(r"\w+", _fold(text))) for text in (problem.question, *problem.supporting_titles)}


def _fold(text: str) -> str:
    """Lower case without accents, with one character for each character of `text`."""
    return "".join(unicodedata.normalize("NFKD", character.lower())[:1] or " " for character in text)
