"""Demonstrations for search agents on the invented encyclopedia, by a script that makes errors on purpose.

A policy trained on its replies knows the format but does the job badly. The errors are those of agents with a memory:
answering before all facts are known, wrong queries, and wrong or lost facts in the memory. The script then acts on the
consequences, so that recovering from an error is demonstrated too.

Demonstrations copy only a few tokens, so a small model learns copying late; the copy and extraction tasks train little
else. And an agent that answers early rarely sees two of three facts, so the action task shows it memories with any
number of facts.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from examples.warmstart.record import HELD_OUT_SEED, copies, decisions, demonstrate, encode_reply, step_seed, task
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.config import agent_of
from memsearcher_jax.data.synthetic.encyclopedia import Encyclopedia, make_encyclopedia
from memsearcher_jax.data.synthetic.relations import noun_phrase
from memsearcher_jax.encoders import text_encoder
from memsearcher_jax.retrieval.search import open_searcher
from memsearcher_jax.rl.rng import named_rng
from memsearcher_jax.rl.setup import Run
from memsearcher_jax.types import Completion, Generate, Problem, Prompt, ScoredTrajectory, SearchResult

EMPTY_MEMORY = "nothing yet."
KNOWN, GUESS = "I know it.", "A guess."
"""Thoughts before an answer, with all facts and without. They differ in the first token: a policy that imitates both
must tell the situations apart, and can then learn from rewards alone not to guess."""
COPIED_SPANS = {
    "query": re.compile(r'(?:"query": "|<search>)(.*?)["<]'),
    "fact": re.compile(r".* is (.*?)\.</memory>"),
    "answer": re.compile(r"(?:\\boxed\{|<answer>)(.*?)[}<]"),
}
"""The names that a reply copies from its context, as group 1 of a pattern."""
OTHER_WORKFLOWS = {"memsearcher": ("react",), "search_r1": ("rag", "direct")}
"""By workflow: what is demonstrated besides, with packaged prompts in the style of its own."""
HISTORY_TOKENS = (0, 96, 176, 256, 1_000)
"""The values of agent.history_tokens with which compact is demonstrated, from MemSearcher to ReAct."""


@dataclass(frozen=True)
class Errors:
    """Probabilities of errors.

    Those in the memory are kept rare, since they teach misreading; answering early alone gives a bad initial
    policy.
    """

    answer_early: float = 0.6  # while facts are missing
    wrong_query: float = 0.1  # a query that is not the name of an entity
    bad_memory: float = 0.1  # a wrong name, or nothing, in the memory


NO_ERRORS = Errors(0, 0, 0)


@dataclass
class SearchDemonstrator:
    """The policy for one problem, in any workflow of search agents. `results` are those of the last search.

    `chain` is the chain of entities as the agent believes it to be: the entity that the question names, then the object
    of each fact.
    """

    problem: Problem
    encyclopedia: Encyclopedia
    errors: Errors
    rng: random.Random
    chain: list[str] = field(default_factory=list)
    workflow: str = "memsearcher"
    results: tuple[SearchResult, ...] = ()

    def __post_init__(self) -> None:
        self.chain = self.chain or [self.problem.metadata["supporting_titles"][0]]
        self.relations: list[str] = self.problem.metadata["relations"]

    def __call__(self, request: Generate) -> Completion:
        if isinstance(request.text, Prompt):
            if self.workflow == "rag":
                self._read_passages()
            return Completion(self.act())
        self._extend_chain()
        return Completion(format_memory(self.memory()) if request.kind == "memory" else self.act())

    def act(self) -> str:
        """The reply that opens a turn: a search or an answer. A workflow of one turn answers in any case."""
        known_facts = len(self.chain) - 1
        newest = self.chain[-1]
        complete = known_facts == len(self.relations)
        if complete or self.workflow in ("rag", "direct") or (known_facts and self._errs(self.errors.answer_early)):
            return self._format(KNOWN if complete else GUESS, "answer", newest)
        query = newest
        relation = self.relations[known_facts]
        if self._errs(self.errors.wrong_query):
            query = newest.split()[-1] if " " in newest else relation
        return self._format(noun_phrase(relation, newest), "search", query)

    def _format(self, thought: str, action: str, text: str) -> str:
        """The reply after `<think>`, or in Search-R1 with it: its prompt does not end with the tag."""
        if self.workflow == "search_r1":
            return f"<think>{thought}</think>\n<{action}>{text}</{action}>"
        return f"{thought}</think>\n{format_answer(text) if action == 'answer' else format_search(text)}"

    def memory(self) -> str:
        """The newest fact, which is all that the rest of the question needs."""
        if len(self.chain) == 1:
            return EMPTY_MEMORY
        return f"{noun_phrase(self.relations[len(self.chain) - 2], self.chain[-2])} is {self.chain[-1]}."

    def _read_passages(self) -> None:
        """Append the facts in the results, one after the other. In error, only the first."""
        while len(self.chain) <= len(self.relations) and (fact := self._next_fact()) is not None:
            self.chain.append(fact)
            if self._errs(self.errors.answer_early):
                break

    def _extend_chain(self) -> None:
        """Append the fact in the results. In error, append another name, or forget all facts."""
        fact = self._next_fact()
        if self._errs(self.errors.bad_memory):
            fact = self._wrong_name(fact) if self.rng.random() < 0.5 else None
            if fact is None:
                self.chain = self.chain[:1]
        if fact is not None:
            self.chain.append(fact)

    def _next_fact(self) -> str | None:
        """The object of the next relation, if a result is about its subject."""
        if self.chain[-1] not in self._titles():
            return None
        return self.encyclopedia.entities[self.chain[-1]].relations.get(self.relations[len(self.chain) - 1])

    def _wrong_name(self, fact: str | None) -> str | None:
        """Another entity that the results mention, or None."""
        entities = [self.encyclopedia.entities[title] for title in self._titles()]
        names = {name for entity in entities for name in entity.relations.values()} - {fact, *self.chain}
        return self.rng.choice(sorted(names)) if names else None

    def _titles(self) -> list[str]:
        return [passage.title for result in self.results for passage in result.passages]

    def _errs(self, probability: float) -> bool:
        return self.rng.random() < probability


def format_search(query: str) -> str:
    """A tool call as the protocol requires it."""
    body = json.dumps({"name": "wikipedia_search", "arguments": {"query": query}}, ensure_ascii=False)
    return f"<tool_call>{body}</tool_call>"


def format_answer(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


def format_memory(text: str) -> str:
    return f"<memory>{text}</memory>"


def step(run: Run, number: int) -> list[ScoredTrajectory]:
    """The demonstrations and tasks of a step: from an encyclopedia that no other step has."""
    seed = run.config.seed
    tokenizer = run.tokenizer
    tasks = Tasks.open(run, step_seed(seed, number))
    demonstrations = tasks.demonstrations(Errors(), number)
    # The generator's name decides the draws, on which the packaged models depend.
    rng = named_rng(seed, "exercises", number)
    copied_ids = np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.stop_ids)
    trained = [
        *chain.from_iterable(demonstrations.values()),
        *copies(tokenizer, rng, copied_ids, 60),
        *tasks.extractions(rng, 150),
    ]
    if run.config.agent.workflow == "memsearcher":
        trained += tasks.actions(rng, Errors(), 80)
    return trained


def held_out(run: Run) -> list[ScoredTrajectory]:
    """Contexts without errors from an encyclopedia of their own, by the kind of copied span that they train."""
    tasks: list[ScoredTrajectory] = []
    for prefix, demonstrations in Tasks.open(run, HELD_OUT_SEED).demonstrations(NO_ERRORS, 0).items():
        for name, span in COPIED_SPANS.items():
            tasks += decisions(prefix + name, demonstrations, span, run.tokenizer)
    return tasks


@dataclass(frozen=True)
class Tasks:
    """Demonstrations and tasks from one encyclopedia, which `run` searches."""

    run: Run
    encyclopedia: Encyclopedia

    @classmethod
    def open(cls, run: Run, seed: int) -> Tasks:
        """A new encyclopedia, with a search engine that keeps no files."""
        encyclopedia = make_encyclopedia(replace(run.config.data.encyclopedia, seed=seed))
        retrieval = replace(run.config.retrieval, index_type="exact")
        with tempfile.TemporaryDirectory() as folder:
            searcher = open_searcher(retrieval, Path(folder) / "index", encyclopedia.passages, text_encoder.load)
        return cls(replace(run, searcher=searcher), encyclopedia)

    def demonstrations(self, errors: Errors, number: int) -> dict[str, list[ScoredTrajectory]]:
        """Demonstrations of 28 random questions under "", and of 12 with each other workflow under "NAME/".

        Of compact, those of 12 random questions with each of `HISTORY_TOKENS`, under "TOKENS/".
        """
        agent = self.run.config.agent
        demonstrations = {}
        if agent.workflow == "compact":
            for tokens in HISTORY_TOKENS:
                limited = replace(agent, history_tokens=tokens)
                demonstrations[f"{tokens}/"] = self._demonstrate(errors, limited, 12, f"compact {tokens}", number)
            return demonstrations
        for name in ("", *OTHER_WORKFLOWS.get(agent.workflow, ())):
            other = replace(agent, workflow=name or agent.workflow)
            count = 12 if name else 28
            demonstrations[name and f"{name}/"] = self._demonstrate(errors, other, count, other.workflow, number)
        return demonstrations

    def _demonstrate(
        self, errors: Errors, agent: AgentConfig, count: int, draws: str, number: int
    ) -> list[ScoredTrajectory]:
        """Demonstrations of `count` random questions by an agent; `draws` and the step's number decide which."""
        config = self.run.config
        rng = named_rng(config.seed, f"demonstrate {draws}", number)
        problems = self._random_problems(rng, count)
        run = replace(self.run, agent=agent_of(replace(config, agent=agent)))
        return demonstrate(run, problems, partial(self.policy, errors, rng, workflow=agent.workflow))

    def policy(self, errors: Errors, rng: np.random.Generator, problem: Problem, **more: Any) -> SearchDemonstrator:
        return SearchDemonstrator(problem, self.encyclopedia, errors, _draw(rng), **more)

    def extractions(self, rng: np.random.Generator, count: int) -> list[ScoredTrajectory]:
        """Random passages, each followed by its facts in random order as a memory states them, which are trained."""
        passages = self.encyclopedia.passages
        encode = self.run.tokenizer.encode_untrusted
        chosen = rng.choice(len(passages), min(count, len(passages)), replace=False)
        shuffle = _draw(rng).shuffle
        tasks = []
        for passage in (passages[row] for row in chosen):
            facts = list(self.encyclopedia.entities[passage.title].relations.items())
            shuffle(facts)
            text = " ".join(f"{noun_phrase(name, passage.title)} is {value}." for name, value in facts)
            spans = [(encode(passage.contents + "\n"), False), (encode(text), True)]
            tasks.append(task("extraction", self.run.tokenizer, spans))
        return tasks

    def actions(self, rng: np.random.Generator, errors: Errors, count: int) -> list[ScoredTrajectory]:
        """First replies of a turn, errors included, to random questions with a correct memory of one or more facts."""
        tokenizer = self.run.tokenizer
        tasks = []
        for problem in self._random_problems(rng, count):
            chain = [*problem.metadata["supporting_titles"], *problem.golden_answers]
            known = chain[: int(rng.integers(2, len(chain) + 1))]
            policy = self.policy(errors, rng, problem, chain=known)
            prompt = tokenizer.prompt(self.run.agent.prompts.initial_prompt(problem.question, policy.memory()))
            reply = encode_reply(tokenizer, policy.act())
            tasks.append(task("action", tokenizer, [*((ids, False) for ids in prompt), (reply, True)]))
        return tasks

    def _random_problems(self, rng: np.random.Generator, count: int) -> list[Problem]:
        """At most `count` different problems of both splits."""
        problems = (*self.encyclopedia.train, *self.encyclopedia.test)
        return [problems[row] for row in rng.choice(len(problems), min(count, len(problems)), replace=False)]


def _draw(rng: np.random.Generator) -> random.Random:
    return random.Random(int(rng.integers(2**63)))
