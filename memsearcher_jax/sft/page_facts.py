"""Facts that the first sentences of a Wikipedia page state, with the questions that ask for them.

With a few hundred questions each page is read for one relation only, and a model learns to copy what stands there most
often. Other questions about the same pages teach it to look for what is asked.
"""

from __future__ import annotations

import re
from dataclasses import replace

from memsearcher_jax.data.questions import decompose, find_title
from memsearcher_jax.types import Problem

_DATE = r"(\d{1,2} [A-Z][a-z]+ \d{4}|[A-Z][a-z]+ \d{1,2}, \d{4})"
_NAME = r"([A-Z][\w'-]+(?:,? (?:of |de |von |the )?[A-Z](?:\.|[\w'-]*))*)"
_NATIONALITY = r"(?:is|was) an? ([A-Z][a-z]+(?:an|ish|ese|ch))\b"
FACTS = (
    (re.compile(rf"born:? (?:on )?{_DATE}"), "When was {} born?"),
    (re.compile(rf"\({_DATE} ?[–-]"), "What is the date of birth of {}?"),
    (re.compile(rf"[–-] ?{_DATE}\)"), "When did {} die?"),
    (re.compile(rf"[–-] ?{_DATE}\)"), "What is the date of death of {}?"),
    (re.compile(rf"born (?:[^.()]{{0,40}} )?in {_NAME}"), "Where was {} born?"),
    (re.compile(rf"died (?:[^.()]{{0,40}} )?(?:in|at) {_NAME}"), "Where was the place of death of {}?"),
    (re.compile(_NATIONALITY), "What nationality is {}?"),
    (re.compile(_NATIONALITY), "Which country {} is from?"),
    (re.compile(rf"\b(?:son|daughter) of (?:[a-z]+ )*{_NAME}"), "Who is the father of {}?"),
    (re.compile(rf"\b(?:married(?: to)?|wife of|husband of) (?:[a-z]+ )*{_NAME}"), "Who is the spouse of {}?"),
)
"""(a pattern whose group 1 is the answer, the question about somebody)."""


def other_questions(problem: Problem, title: str, text: str) -> list[tuple[Problem, Problem]]:
    """(a two-hop question like this one for another fact of its second page, the same fact asked alone).

    Args:
      problem: a question that `decompose` splits; any other has none.
      title: of the second page.
      text: of the second page.
    """
    others = (find_title(one, problem.question) for one in problem.supporting_titles if one != title)
    named = max(others, key=len, default="")
    name = find_title(title, text)
    parts = decompose(problem.question, named, name) if named and name else None
    if parts is None:
        return []
    described = parts[0].removeprefix("Who is ").removesuffix("?")
    pairs = []
    for number, (pattern, question) in enumerate(FACTS):
        if (match := pattern.search(text)) and question.format(described) != problem.question:
            whole = replace(
                problem,
                id=f"{problem.id}/fact{number}",
                question=question.format(described),
                golden_answers=(match[1],),
            )
            metadata = {"supporting_titles": [title]}
            alone = replace(whole, id=f"{whole.id}/2", question=question.format(name), metadata=metadata)
            pairs.append((whole, alone))
    return pairs
