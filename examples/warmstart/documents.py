"""Demonstrations for MemAgent on generated documents: single contexts, by a script that errs on purpose.

A reply first repeats the title of the chunk, then says whether the question asks about it, then writes the memory: the
fact that was found, or the memory as it was. In a document nearly every chunk is about something else, so a context
takes a memory and a chunk at random, and the cases that decide are frequent: the passage of the question, one that
mentions its subject, one of a similar name. Comparing names is learned late from such contexts alone; lists of titles,
each with its verdict, train little else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from examples.warmstart.record import HELD_OUT_SEED, encode_reply, step_seed, task
from memsearcher_jax.data.synthetic.encyclopedia import make_encyclopedia
from memsearcher_jax.data.synthetic.entity_names import named_random
from memsearcher_jax.data.synthetic.relations import make_passage, noun_phrase
from memsearcher_jax.rl.rng import named_rng
from memsearcher_jax.rl.setup import Run
from memsearcher_jax.types import Problem, ScoredTrajectory

UNKNOWN = "not found"
FOUND, OTHER = " found", " not"
"""Verdicts on a title."""
MEMORIES = {"known": 0.25, "wrong": 0.1, "unknown": 0.4, "empty": 0.25}
"""Shares of what the memory says: the fact, another name in its place, that it is not found, nothing."""


@dataclass(frozen=True)
class Mixture:
    """What a step has."""

    contexts: int
    lists: int
    chunks: Mapping[str, float]
    """Shares of chunks: the subject's passage, one that mentions the subject, one of a similar name, any; `answer` is
    the context without a chunk."""


EARLY_STEPS = 80
EARLY = Mixture(320, 140, {"passage": 0.4, "mention": 0.02, "similar": 0.03, "any": 0.45, "answer": 0.1})
LATE = Mixture(400, 60, {"passage": 0.3, "mention": 0.15, "similar": 0.15, "any": 0.3, "answer": 0.1})
HELD_OUT = Mixture(600, 40, LATE.chunks)


@dataclass(frozen=True)
class Errors:
    """Probabilities of errors."""

    forgets: float = 0.06  # what the memory says
    misses: float = 0.1  # the passage
    misreads: float = 0.06  # another passage, as if it were about the subject


NO_ERRORS = Errors(0, 0, 0)


def held_out(run: Run) -> list[ScoredTrajectory]:
    """Contexts without errors, of an encyclopedia that no step has; their sources are memory and chunk."""
    return _demonstrations(run, HELD_OUT_SEED, HELD_OUT, NO_ERRORS)


def step(run: Run, number: int) -> list[ScoredTrajectory]:
    """The contexts and lists of one training step, of an encyclopedia of its own."""
    mixture = EARLY if number < EARLY_STEPS else LATE
    return _demonstrations(run, step_seed(run.config.seed, number), mixture, Errors())


def _demonstrations(run: Run, seed: int, mixture: Mixture, errors: Errors) -> list[ScoredTrajectory]:
    script = DocumentDemonstrator(run, seed)
    contexts = [script.context(mixture.chunks, errors) for _ in range(mixture.contexts)]
    return contexts + [script.title_list() for _ in range(mixture.lists)]


class DocumentDemonstrator:
    """Draws contexts about one encyclopedia."""

    def __init__(self, run: Run, seed: int):
        config = replace(run.config.data.encyclopedia, seed=seed, train_questions=240, test_questions=0)
        encyclopedia = make_encyclopedia(config)
        words = named_random(seed, "document passages")
        self.tokenizer = run.tokenizer
        self.prompts = run.agent.prompts
        self.rng = named_rng(seed, "demonstrate documents", 0)
        self.problems = encyclopedia.train
        self.entities = encyclopedia.entities
        self.passages = {name: make_passage(words, entity, named_share=1.0) for name, entity in self.entities.items()}

    def context(self, chunks: Mapping[str, float], errors: Errors) -> ScoredTrajectory:
        """A memory and a chunk with the reply, or a memory with the answer."""
        problem: Problem = self._one_of(self.problems)
        (subject,) = problem.supporting_titles
        (relation,) = problem.metadata["relations"]
        (answer,) = problem.golden_answers
        fact = f"{noun_phrase(relation, subject)} is"
        memory = self._pick(MEMORIES)
        chunk = self._pick(chunks)
        values = (entity.relations.get(relation, answer) for entity in self.entities.values())
        wrong = self._one_of([value for value in values if value != answer])
        value = {"known": answer, "wrong": wrong}.get(memory, UNKNOWN)
        shown_memory = "" if memory == "empty" else f"{fact} {value}."
        if chunk == "answer":
            prompt = self.prompts.initial_prompt(problem.question, shown_memory)
            reply = f"\\boxed{{{value}}}"
        else:
            title = self._title(chunk, subject)
            prompt = self.prompts.read(problem.question, shown_memory, self.passages[title])
            draw = self.rng.random()
            relations = self.entities[title].relations
            found = draw >= errors.misses if title == subject else draw < errors.misreads and relation in relations
            if found:
                value = relations[relation]
            elif draw > 1 - errors.forgets:
                value = UNKNOWN
            reply = f'"{title}"\n{FOUND if found else OTHER}\n<memory>{fact} {value}.</memory>'
        spans = [*((ids, False) for ids in self.tokenizer.prompt(prompt)), (encode_reply(self.tokenizer, reply), True)]
        return task(f"{memory}/{chunk}", self.tokenizer, spans)

    def title_list(self) -> ScoredTrajectory:
        """A question and titles, each with its verdict, which alone is trained."""
        problem = self._one_of(self.problems)
        encode = self.tokenizer.encode_untrusted
        (subject,) = problem.supporting_titles
        similar = self._similar(subject)
        names = list(self.passages)
        spans = [(encode(f"<question> {problem.question} </question>"), False)]
        for _ in range(10):
            draw = self.rng.random()
            if draw < 0.3:
                title = subject
            elif draw < 0.55:
                title = self._one_of(similar or names)
            else:
                title = self._one_of(names)
            verdict = FOUND if title == subject else OTHER
            spans += [(encode(f'\n\n"{title}"\n'), False), (encode(verdict), True)]
        return task("list", self.tokenizer, spans)

    def _title(self, chunk: str, subject: str) -> str:
        """The title of such a chunk, or of any where there is none."""
        if chunk == "passage":
            return subject
        titles = list[str]()
        if chunk == "mention":
            titles = [name for name, entity in self.entities.items() if subject in entity.relations.values()]
        elif chunk == "similar":
            titles = self._similar(subject)
        return self._one_of(titles or [name for name in self.passages if name != subject])

    def _similar(self, subject: str) -> list[str]:
        """The names that share a word."""
        words = set(subject.split()) - {"The", "of"}
        return [name for name in self.passages if name != subject and words & set(name.split())]

    def _pick(self, shares: Mapping[str, float]) -> str:
        return str(self.rng.choice(list(shares), p=list(shares.values())))

    def _one_of(self, items: Sequence[Any]) -> Any:
        return items[self.rng.integers(len(items))]
