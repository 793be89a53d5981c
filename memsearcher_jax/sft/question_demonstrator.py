"""A scripted search agent for real questions, which knows the answer and the titles of the pages that hold it.

Each turn states in its thought what the next page must answer, searches for the page that the question names, and
copies the answer into the memory as "QUESTION ANSWER. Next: STEP.", where STEP is the rest of the question or "answer
ANSWER". So the wording of the question decides whether to search again, and each page is read for one relation. The
thought says whether another step follows: a model that has to decide by the memory's question alone takes every first
answer for the last one. An agent that keeps its history writes the same text into its next thought.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from memsearcher_jax.data.questions import find_name, find_title
from memsearcher_jax.sft.question_steps import decompose
from memsearcher_jax.sft.search_demonstrator import format_answer, format_memory, format_search
from memsearcher_jax.types import Completion, Generate, Problem, Prompt, Search, SearchResult

PLAN, ANSWER = "{} Then: {}", "The memory has the answer."
"""Thoughts before a search, and before the answer. What follows is said after what is asked first: a model that begins
with "First" or "Last" chooses by the question's first word."""
UNKNOWN = "that person"
"""In a thought, the person that the page will name: relations lead to persons."""
NOTHING = "Nothing."
"""The memory of a script that gives up. It is not imitated."""

LEADING_WORDS = 6
LONGEST_REPEATED = 120
"""Characters of a question that is repeated in the memory, before its answer."""
_SENTENCE_START = re.compile(r"(?<=[\w)][\w)][.!?])\s+")


@dataclass
class QuestionDemonstrator:
    """The policy for one problem, in workflows with a memory and with a history.

    It gives up, with an empty answer, where search or a passage does not lead on.
    """

    problem: Problem
    asked: str = ""  # what is left of the question
    wanted: tuple[str, str] | None = None  # title and query of the next search
    answer: str | None = None
    visited: set[str] = field(default_factory=set)  # titles

    def __post_init__(self) -> None:
        self.asked = self.problem.question
        # The longest name is the least ambiguous.
        self.wanted = max(self._named_in(self.problem.question), key=lambda page: len(page[1]), default=None)

    def observe(self, request: Search, results: tuple[SearchResult, ...]) -> tuple[SearchResult, ...]:
        """The script reads what the workflow shows of the results."""
        return results

    def __call__(self, request: Generate) -> Completion:
        read = ""
        if not isinstance(request.text, Prompt):
            read = self._read([span.text for span in request.text if not span.trusted][-1])
            if not request.text[-1].text.endswith("<think>"):
                return Completion(format_memory(read))
        if self.answer is not None or self.wanted is None:
            return Completion(f"{read or ANSWER}</think>\n{format_answer(self.answer or '')}")
        return Completion(f"{read or self._thought(*self.wanted)}</think>\n{format_search(self.wanted[1])}")

    def _thought(self, title: str, name: str) -> str:
        """What the page has to answer, so that the memory follows from the thought and the passage."""
        if parts := decompose(self.asked, name, UNKNOWN):
            return PLAN.format(*parts)
        others = set(self.problem.supporting_titles) - self.visited - {title}
        follows = others and self.asked == self.problem.question
        return PLAN.format(f"{name}.", "another page.") if follows else PLAN.format(self.asked, "answer.")

    def _read(self, shown: str) -> str:
        """The memory after a search, which decides the next step. `shown`: the passages, clipped to their budget."""
        assert self.wanted is not None, "a memory follows a search"
        (title, query), self.wanted = self.wanted, None
        titles = [line.strip().strip('"') for line in shown.split("\n")]
        if title not in titles:
            return NOTHING
        self.visited.add(title)
        text = "\n".join(shown.split("\n")[titles.index(title) + 1 :])
        if following := next(iter(self._named_in(text)), None):
            self.wanted, name = following, following[1]
            parts = decompose(self.asked, query, name)
            self.asked = parts[1] if parts else self.problem.question
            return f"{parts[0]} {name}. Next: {parts[1]}" if parts else f"{clause(text, name)}. Next: {name}."
        if name := next(filter(None, (find_name(answer, text) for answer in self.problem.golden_answers)), ""):
            self.answer = name
            read = f"{self.asked} {name}" if len(self.asked) < LONGEST_REPEATED else clause(text, name)
            return f"{read}. Next: answer {name}."
        return NOTHING

    def _named_in(self, text: str) -> list[tuple[str, str]]:
        """(title, name in the text) of the supporting pages that the text names and that were not read."""
        unread = [title for title in self.problem.supporting_titles if title not in self.visited]
        return [(title, name) for title in unread if (name := find_title(title, text))]


def clause(text: str, name: str) -> str:
    """The first occurrence of the name and the few words of its sentence before it, which state the relation.

    Longer quotes begin with the first words of a passage whatever the question asks, and a model learns only that.
    """
    start = text.index(name)
    sentence = _SENTENCE_START.split(text[:start])[-1]
    words = re.findall(r"\S+\s*", sentence)
    return "".join(words[-LEADING_WORDS:]) + name
