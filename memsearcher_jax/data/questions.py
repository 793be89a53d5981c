"""Kinds of questions, and names in texts."""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

from memsearcher_jax.types import Problem

QuestionKind = Literal["all", "span", "choice"]
"""choice: the answer is yes, no or one of the options in the question. span: any other, which takes a search."""

_OPTIONS = re.compile(r"(?:, |^Was )(.+?),? or |(?:out of |^Between )(.+?) and ")


def of_kind(problem: Problem, kind: QuestionKind) -> bool:
    """Whether the question is of this kind. Choices can be guessed: a rule without a model gets many of them right."""
    answers, question = problem.golden_answers, problem.question
    guessable = [fold(answer).strip() in ("yes", "no") or find_name(answer, question) for answer in answers]
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
    words = re.findall(r"\w+", fold(name))
    pattern = r"(?<!\w)" + r"\W{1,3}".join(words) + (r"\)" if name.endswith(")") else r"(?!\w)")
    match = re.search(pattern, fold(text)) if words else None
    return text[match.start() : match.end()] if match else ""


def fold(text: str) -> str:
    """Lower case without accents, with one character for each character of `text`."""
    return "".join(unicodedata.normalize("NFKD", character.lower())[:1] or " " for character in text)
