"""Kinds of questions, and names in texts."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from memsearcher_jax.types import Problem


def is_choice(problem: Problem) -> bool:
    """Whether the answer is yes, no or one of the options in the question, which can be guessed without a search."""
    # All answers, because an alias of Norway is "no".
    return bool(problem.golden_answers) and all(
        fold(answer).strip() in ("yes", "no") or find_name(answer, problem.question)
        for answer in problem.golden_answers
    )


def of_kind(problems: Iterable[Problem], kind: str) -> list[Problem]:
    """The problems that `data.questions` selects: "all", or of kind "span" those that are no choice."""
    return [problem for problem in problems if kind == "all" or not is_choice(problem)]


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
