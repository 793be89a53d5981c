"""Kinds of questions, names in texts, and splits of questions that share no entity."""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from memsearcher_jax.types import Problem

QuestionKind = Literal["all", "span", "choice"]
"""choice: the answer is yes, no or one of the options in the question. span: any other, which takes a search."""

_OPTIONS = re.compile(r"(?:, |^Was )(.+?),? or |(?:out of |^Between )(.+?) and ")
_RELATIONS = ("director", "composer", "performer", "father", "mother", "husband", "wife", "spouse")
_KINSHIP = {
    "paternal grandfather": ("father", "father"),
    "paternal grandmother": ("father", "mother"),
    "maternal grandfather": ("mother", "father"),
    "maternal grandmother": ("mother", "mother"),
    "father-in-law": ("spouse", "father"),
    "mother-in-law": ("spouse", "mother"),
    "stepmother": ("father", "spouse"),
    "stepfather": ("mother", "spouse"),
}
"""A relation of two steps -> the two relations."""
_PARENTHESIS = re.compile(r"\s*\([^()]*\)$")


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
    bare = _PARENTHESIS.sub("", title)
    return find_name(title, text) or find_name(bare, text) or find_name(bare.partition(",")[0], text)


def decompose(question: str, name: str, bridge: str) -> tuple[str, str] | None:
    """The two steps of a question such as "When did A's father die?": "Who is A's father?", and, with `bridge` as the
    answer, "When did B die?". None if the question does not describe somebody by their relation to `name`.
    """
    relation = "|".join((*_RELATIONS, *_KINSHIP))
    name = re.escape(name) + "[!.]*"  # `find_title` leaves out the last punctuation of a title
    possessive = re.search(rf"{name}'s ({relation})(?![\w-])", question)
    match = possessive or re.search(rf"the ({relation}) of (?:film |song )?{name}(?!\w)", question)
    if match is None:
        return None
    inner, outer = _KINSHIP.get(match[1], (match[1], ""))
    first = f"Who is {match[0].replace(match[1], inner)}?"
    rest = bridge if not outer else f"{bridge}'s {outer}" if possessive else f"the {outer} of {bridge}"
    return None if first == question else (first, question.replace(match[0], rest))


def steps(problem: Problem) -> tuple[Problem, ...]:
    """The one-hop questions of a two-hop question whose supporting titles say which pages answer them; else ()."""
    titles = problem.supporting_titles
    named = [(title, name) for title in titles if (name := find_title(title, problem.question))]
    if len(titles) != 2 or len(named) != 1:
        return ()
    title, name = named[0]
    other = next(one for one in titles if one != title)
    bridge = _PARENTHESIS.sub("", other)
    if (parts := decompose(problem.question, name, bridge)) is None:
        return ()
    first = replace(
        problem,
        id=f"{problem.id}/1",
        question=parts[0],
        golden_answers=(bridge,),
        metadata={"supporting_titles": [title]},
    )
    return first, replace(problem, id=f"{problem.id}/2", question=parts[1], metadata={"supporting_titles": [other]})


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
