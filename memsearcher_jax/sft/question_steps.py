"""The steps of a multi-hop question, as questions of their own."""

from __future__ import annotations

import re
from dataclasses import replace

from memsearcher_jax.data.questions import find_title
from memsearcher_jax.types import Problem, plain_title

_RELATIONS = ("director", "composer", "performer", "father", "mother", "husband", "wife", "spouse")
KINSHIP = {
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


def decompose(question: str, name: str, bridge: str) -> tuple[str, str] | None:
    """The two steps of a question such as "When did A's father die?": "Who is A's father?", and, with `bridge` as the
    answer, "When did B die?". None if the question does not describe somebody by their relation to `name`.
    """
    relation = "|".join((*_RELATIONS, *KINSHIP))
    name = re.escape(name) + "[!.]*"  # `find_title` leaves out the last punctuation of a title
    possessive = re.search(rf"{name}'s ({relation})(?![\w-])", question)
    match = possessive or re.search(rf"the ({relation}) of (?:film |song )?{name}(?!\w)", question)
    if match is None:
        return None
    inner, outer = KINSHIP.get(match[1], (match[1], ""))
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
    bridge = plain_title(other)
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
