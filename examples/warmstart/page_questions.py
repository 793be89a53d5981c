"""Two-hop questions made from passages: a page names somebody by a relation, and that person's page states a fact.

They are worded as in 2WikiMultihopQA, whose questions were made from templates, too. A few hundred benchmark questions
teach a model their names; with many other pages it has to learn to read.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from itertools import zip_longest

from examples.warmstart.questions import KINSHIP
from memsearcher_jax.types import Passage, Problem

HEAD = 600  # characters of a page that are read: an agent is shown little more
LONGEST_TITLE = 80
_DATE = r"(\d{1,2} [A-Z][a-z]+ \d{4}|[A-Z][a-z]+ \d{1,2}, \d{4})"
_WORD = r"[A-Z](?:\.|[\w'-]*)"
_NAME = rf"([A-Z][\w'-]+(?:,? (?:of |de |von |the )?{_WORD})*)"
_PLACE = rf"([A-Z][\w'-]+(?: (?:of |de |von |the )?{_WORD})*)\b(?! \d)"
"""As the reference answers name it: "Barcelona" of "Barcelona, Spain"; not "January 1802"."""
FACTS = (
    (rf"born:? (?:on )?{_DATE}|\({_DATE} ?[–-]", ("When was {} born?", "What is the date of birth of {}?")),
    (rf"[–-] ?{_DATE}\)", ("When did {} die?", "What is the date of death of {}?")),
    (rf"born (?:[^.()]{{0,40}} )?in {_PLACE}", ("Where was {} born?", "What is the place of birth of {}?")),
    (rf"died (?:[^.()]{{0,40}} )?(?:in|at) {_PLACE}", ("Where did {} die?", "Where was the place of death of {}?")),
    (r"(?:is|was) an? ([A-Z][a-z]+(?:an|ish|ese|ch))\b", ("What nationality is {}?", "Which country {} is from?")),
    (rf"\b(?:son|daughter) of (?:[a-z]+ )*{_NAME}", ("Who is the father of {}?",)),
    (
        rf"\b(?:son|daughter) of [^.;]{{2,60}}? and (?:his (?:[a-z]+ )*wife,? )?(?!{_WORD}[.,;)]){_NAME}",
        ("Who is the mother of {}?",),
    ),
    (rf"\b(?:married(?: to)?|wife of|husband of) (?:[a-z]+ )*{_NAME}", ("Who is the spouse of {}?",)),
)
"""(a pattern whose group is the answer, questions about somebody)."""
_WORK = re.compile(r"\b(?:film|song|album|series|novel|play)\b")
RELATIONS = (
    (r"\bfilm\b[^.]*? directed by ", "director", "film", ("he", "she", "")),
    (r"\bsong\b[^.]*? by ", "performer", "song", ("he", "she", "")),
    (r"\b(?:son|daughter|child) of ", "father", "", ("he", "")),
    (r"\b(?:son|daughter|child) of [^.;]{2,60}? and (?:his (?:[a-z]+ )*wife,? )?", "mother", "", ("she", "")),
    (r"\b(?:married(?: to)?|wife of) ", "husband", "", ("he",)),
    (r"\b(?:married(?: to)?|husband of) ", "wife", "", ("she",)),
)
"""(what precedes a name, whose name it is, of which kind of work, the pronoun of that person's page, "" for none)."""


def page_questions(passages: Iterable[Passage], seed: int) -> list[Problem]:
    """A question for each fact of a page that another page names, in random order, all kinds of facts in turn.

    A passage is `"TITLE"`, a line break, and the text; of several passages with one title the first is used.
    """
    pages: dict[str, str] = {}
    for passage in passages:
        pages.setdefault(passage.title, passage.contents.partition("\n")[2][:HEAD])
    rng = random.Random(seed)
    problems: list[list[Problem]] = [[] for _ in FACTS]
    for title, text in pages.items():
        for relation, work, other in _named_persons(title, text, pages):
            for number, (fact, questions) in enumerate(FACTS):
                if match := re.search(fact, pages[other]):
                    question = _worded(title, relation, work, rng.choice(questions), rng)
                    answer = next(group for group in match.groups() if group)
                    metadata = {"supporting_titles": [title, other]}
                    problems[number].append(Problem(f"page/{title}/{relation}/{number}", question, (answer,), metadata))
    for of_fact in problems:
        rng.shuffle(of_fact)
    return [problem for row in zip_longest(*problems) for problem in row if problem]


def _named_persons(title: str, text: str, pages: dict[str, str]) -> list[tuple[str, str, str]]:
    """(relation to the page's subject, kind of work or "" for a person, title of the page)."""
    persons = []
    is_work = _WORK.search(text[:100]) is not None
    for pattern, relation, work, pronouns in RELATIONS:
        match = re.search(pattern, text) if is_work == bool(work) else None
        other = _title_at(text, match.end(), pages) if match else ""
        if other and other != title and _pronoun(pages[other]) in pronouns:
            persons.append((relation, work, other))
    return persons


def _title_at(text: str, start: int, pages: dict[str, str]) -> str:
    """The longest title, of at least two words, that the text has at `start` or a few common words later; or ""."""
    name = re.compile(r"(?:[a-z][\w'-]*,? ){0,4}(?=[A-Z])").match(text, start)
    rest = text[name.end() :][:LONGEST_TITLE] if name else ""
    ends = [border.start() for border in re.finditer(r"[ .,;()\n]|$", rest)]
    return next((rest[:end] for end in reversed(ends) if " " in rest[:end] and rest[:end] in pages), "")


def _pronoun(text: str) -> str:
    male, female = (len(re.findall(words, text)) for words in (r"\b[Hh](?:e|is|im)\b", r"\b(?:[Ss]he|[Hh]er)\b"))
    return "he" if male > female else "she" if female > male else ""


def _worded(title: str, relation: str, work: str, question: str, rng: random.Random) -> str:
    """The question about who has the relation to the page: its second step is `question`."""
    name = title.title()  # as in 2WikiMultihopQA
    if work:
        return question.format(f"the {relation} of {work} {name}")
    first = "spouse" if relation in ("husband", "wife") else relation
    kinship = {f"Who is the {then} of {{}}?": word for word, (one, then) in KINSHIP.items() if one == first}
    if question in kinship and not kinship[question].startswith("step"):  # a father's spouse may be the mother
        relation, question = kinship[question], "Who is {}?"
    return question.format(rng.choice((f"{name}'s {relation}", f"the {relation} of {name}")))
