"""A seeded workload of search trajectories with forced lengths; a text is a list of token ids, one word per id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from memsearcher_jax.types import (
    Completion,
    FinishReason,
    Generate,
    Outcome,
    Passage,
    Problem,
    Prompt,
    Query,
    Search,
    StopReason,
    TextSpan,
    Workflow,
)

SYSTEM, BRIDGE, SUFFIX = 449, 4, 6  # approximate tokens of the fixed segments of the published prompt
CONTEXT = 2_400  # tokens of the longest turn, rounded up
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Turn:
    """Lengths of one turn, in tokens. The last turn of a trajectory has only a thought."""

    think: int
    observation: Ids
    memory: int


@dataclass(frozen=True)
class Plan:
    """One trajectory to generate."""

    question: Ids
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Workload:
    """The input of all programs."""

    system: Ids
    bridge: Ids
    suffix: Ids
    plans: tuple[Plan, ...]

    @property
    def generated_tokens(self) -> int:
        """A last turn rewrites no memory."""
        thoughts = sum(turn.think for plan in self.plans for turn in plan.turns)
        return thoughts + sum(turn.memory for plan in self.plans for turn in plan.turns[:-1])

    def prompt(self, plan: Plan, memory: Sequence[int]) -> Ids:
        """The ids of a context before its first generation."""
        return (*self.system, *plan.question, *self.bridge, *memory, *self.suffix)


def make_workload(trajectories: int, rollouts: int, vocab_size: int, seed: int = 0) -> Workload:
    """`trajectories` in groups of `rollouts` that share a question; all lengths are uniform in their range."""
    rng = np.random.default_rng(seed)

    def ids(count: int) -> Ids:
        return tuple(rng.integers(0, vocab_size, count).tolist())

    def turn() -> Turn:
        return Turn(int(rng.integers(30, 151)), ids(int(rng.integers(300, 901))), int(rng.integers(50, 401)))

    system, bridge, suffix = ids(SYSTEM), ids(BRIDGE), ids(SUFFIX)
    questions = [ids(int(rng.integers(20, 61))) for _ in range(-(-trajectories // rollouts))]
    plans = tuple(
        Plan(questions[number // rollouts], tuple(turn() for _ in range(int(rng.integers(1, 7)))))
        for number in range(trajectories)
    )
    return Workload(system, bridge, suffix, plans)


def problems(workload: Workload) -> list[Problem]:
    """One problem for each trajectory, with its plan."""
    plans = enumerate(workload.plans)
    return [Problem(str(number), words(plan.question), (), {"plan": plan}) for number, plan in plans]


def workflow_of(workload: Workload) -> Callable[[Problem], Workflow]:
    """MemSearcher's turns with the lengths of the plan."""
    system, bridge, suffix = words(workload.system), words(workload.bridge), words(workload.suffix)

    def workflow(problem: Problem) -> Workflow:
        memory = ""
        turns = problem.metadata["plan"].turns
        for number, turn in enumerate(turns, start=1):
            texts = system, problem.question, bridge, memory, suffix
            yield Generate(Prompt(tuple(TextSpan(text, True) for text in texts)), turn.think)
            if number == len(turns):
                return Outcome(StopReason.ANSWERED)
            yield Search((Query(problem.question, 1),))
            completion = yield Generate((TextSpan(words(turn.observation), False),), turn.memory)
            memory = completion.text
        raise AssertionError("a trajectory has at least one turn")

    return workflow


def words(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


class NoPassages:
    """A `Searcher` that finds one empty passage."""

    def search(self, queries: Sequence[str], top_n: int) -> list[list[Passage]]:
        return [[Passage("0", "")] for _ in queries]


class NumberTokenizer:
    """The part of a tokenizer that a rollout calls, for texts of token ids."""

    stop_ids, clip = (), str  # `clip` is for tools, which no workflow here calls

    def prompt(self, prompt: Prompt) -> tuple[Ids, ...]:
        return tuple(self._encode(segment.text) for segment in prompt.segments)

    def encode_spans(self, spans: Sequence[TextSpan]) -> Ids:
        return tuple(id for span in spans for id in self._encode(span.text))

    def completion(self, ids: Sequence[int], *, found_stop: bool = False) -> Completion:
        return Completion(words(ids), FinishReason.LENGTH)

    def transcript(self, ids: Sequence[int]) -> str:
        return words(ids)

    def _encode(self, text: str) -> Ids:
        return tuple(map(int, text.split()))
