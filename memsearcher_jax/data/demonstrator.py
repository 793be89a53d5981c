"""A scripted agent that knows the embedded world, and is wrong on purpose.

It plays the policy's part in a workflow, so that what it says can be learnt by supervision: a warm start that knows the
format and does the job badly. Its errors are of the three kinds that a memory agent makes. It answers before it knows;
it queries for the wrong thing; it writes down the wrong fact, or forgets what it knew. Each is followed by what an
agent would then do, so that recovering is demonstrated too.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

from memsearcher_jax.agent.types import Find, Found, Problem, Prompt, Reply, Say
from memsearcher_jax.data.language import RELATION
from memsearcher_jax.data.world import World

NOTHING = "nothing yet."
KNOWN, GUESS = "I know it.", "A guess."
"""What it thinks before it answers, with all facts and without. They differ from the first word on: who imitates it has
to tell the two situations apart, and can then learn from rewards alone to leave the guesses out."""


@dataclass(frozen=True)
class Errors:
    """Probabilities, each drawn anew whenever there is a chance for the error."""

    answer_early: float = 0.7
    """To answer with what is known while facts are missing."""
    wrong_query: float = 0.1
    """To search for less than the name."""
    bad_memory: float = 0.1
    """To note another name of the results, or (half of the time) nothing at all."""


@dataclass
class Demonstrator:
    """Plays one problem. Call it with each `Say`; tell it with `read` what each search found.

    It plays both workflows: with a memory it writes down what it learnt when it is asked to, in a history it knows it
    by having read it, and its next thought says so.
    `path` is the chain as the agent believes it to be: the entity that the question names, then what each fact led to.
    """

    problem: Problem
    world: World
    errors: Errors
    rng: random.Random
    path: list[str] = field(default_factory=list)
    found: tuple[Found, ...] = ()

    def __post_init__(self) -> None:
        self.path = self.path or [self.problem.metadata["supporting_titles"][0]]

    @property
    def relations(self) -> list[str]:
        return self.problem.metadata["relations"]

    def read(self, find: Find, found: tuple[Found, ...]) -> tuple[Found, ...]:
        """Takes note of what a search found, and passes it on."""
        self.found = found
        return found

    def __call__(self, say: Say) -> Reply:
        if isinstance(say.text, Prompt):
            return Reply(self.act())
        if say.text[-1].text.endswith("<think>"):
            self._take_note()
            return Reply(self.act())
        return Reply(self._remember())

    def act(self) -> str:
        """What it says at the beginning of a turn, behind the `<think>` that opens it: a search, or its answer."""
        known = len(self.path) - 1
        if known == len(self.relations):
            return f"{KNOWN}</think>\n{box(self.path[-1])}"
        if known and self._errs(self.errors.answer_early):
            return f"{GUESS}</think>\n{box(self.path[-1])}"
        query = self.path[-1]
        if self._errs(self.errors.wrong_query):
            query = query.split()[-1] if " " in query else self.relations[known]
        return f"{self._wanted()}</think>\n{call(query)}"

    def _remember(self) -> str:
        self._take_note()
        return memory(self.known())

    def _take_note(self) -> None:
        """Goes on along the path by what was read, or, in error, elsewhere or back to where it began."""
        fact = self._fact()
        if self._errs(self.errors.bad_memory):
            fact = self._other_name(fact) if self.rng.random() < 0.5 else None
            if fact is None:
                self.path = self.path[:1]
        if fact is not None:
            self.path.append(fact)

    def _wanted(self) -> str:
        """The fact that is looked for now, such as "the mother of X"."""
        relation = self.relations[len(self.path) - 1]
        return RELATION[relation].phrase.format(x=self.path[-1])

    def known(self) -> str:
        """What it has in its memory: the newest fact, which is all that the rest of the question needs."""
        if len(self.path) == 1:
            return NOTHING
        relation = self.relations[len(self.path) - 2]
        return f"{RELATION[relation].phrase.format(x=self.path[-2])} is {self.path[-1]}."

    def _fact(self) -> str | None:
        """What the wanted relation leads to, if the results say so."""
        if self.path[-1] not in self._titles():
            return None
        return self.world.entities[self.path[-1]].relations.get(self.relations[len(self.path) - 1])

    def _other_name(self, right: str | None) -> str | None:
        """A name that the results hold beside the right one, of an entity that has a passage; None if there is none."""
        names = {name for title in self._titles() for name in self.world.entities[title].relations.values()}
        names -= {right, *self.path}
        return self.rng.choice(sorted(names)) if names else None

    def _titles(self) -> list[str]:
        return [passage.title for found in self.found for passage in found.passages]

    def _errs(self, probability: float) -> bool:
        return self.rng.random() < probability


def call(query: str) -> str:
    """A tool call as the protocol wants it."""
    body = json.dumps({"name": "wikipedia_search", "arguments": {"query": query}}, ensure_ascii=False)
    return f"<tool_call>{body}</tool_call>"


def box(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


def memory(text: str) -> str:
    return f"<memory>{text}</memory>"
