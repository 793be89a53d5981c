"""A seeded workload of search trajectories with forced lengths, as text that is numbers: one word per token id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memsearcher_jax.agent.types import (
    Find,
    Finish,
    Outcome,
    Passage,
    Piece,
    Problem,
    Prompt,
    Query,
    Reply,
    Say,
    Stop,
    Workflow,
)
from memsearcher_jax.sampling.buffer import PromptIds, PromptWidths

SYSTEM, BRIDGE, SUFFIX = 449, 4, 6  # tokens of the published prompt's fixed parts, about
WIDTHS = PromptWidths(prefix=SYSTEM, question=60, bridge=BRIDGE, memory=400, suffix=SUFFIX)
CONTEXT = 2_400  # holds the longest turn


@dataclass(frozen=True)
class Turn:
    """One turn's lengths, in tokens: what is said, read, and said again. The last turn of a trajectory only says."""

    think: int
    observation: tuple[int, ...]  # ids
    memory: int


@dataclass(frozen=True)
class Plan:
    """One trajectory to serve."""

    question: tuple[int, ...]  # ids
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Workload:
    """What all programs serve."""

    system: tuple[int, ...]
    bridge: tuple[int, ...]
    suffix: tuple[int, ...]
    plans: tuple[Plan, ...]


def make_workload(trajectories: int, rollouts: int, vocab_size: int, seed: int = 0) -> Workload:
    """`trajectories` in groups of `rollouts` that share a question; every number is uniform in its range."""
    draw = np.random.default_rng(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.integers(0, vocab_size, count).tolist())

    def turn() -> Turn:
        return Turn(int(draw.integers(30, 151)), ids(int(draw.integers(300, 901))), int(draw.integers(50, 401)))

    system, bridge, suffix = ids(SYSTEM), ids(BRIDGE), ids(SUFFIX)
    questions = [ids(int(draw.integers(20, 61))) for _ in range(-(-trajectories // rollouts))]
    plans = tuple(
        Plan(questions[number // rollouts], tuple(turn() for _ in range(int(draw.integers(1, 7)))))
        for number in range(trajectories)
    )
    return Workload(system, bridge, suffix, plans)


def problems(workload: Workload) -> list[Problem]:
    """A problem for each trajectory, with its plan."""
    return [
        Problem(str(number), words(plan.question), (), {"plan": plan}) for number, plan in enumerate(workload.plans)
    ]


def serve(workload: Workload):
    """The workflow of MemSearcher's turns, with the plan's lengths: what a `RolloutDriver` runs."""
    system, bridge, suffix = words(workload.system), words(workload.bridge), words(workload.suffix)

    def workflow(problem: Problem) -> Workflow:
        memory = ""
        turns = problem.metadata["plan"].turns
        for number, turn in enumerate(turns, start=1):
            yield Say(Prompt(system, problem.question, bridge, memory, suffix), turn.think)
            if number == len(turns):
                return Outcome(Stop.ANSWERED)
            yield Find((Query(problem.question, 1),))
            reply = yield Say((Piece(words(turn.observation), False),), turn.memory)
            memory = reply.text
        raise AssertionError("a trajectory has at least one turn")

    return workflow


def words(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


class NumberTokenizer:
    """What a `RolloutDriver` needs of a tokenizer, for text that is numbers."""

    def prompt(self, prompt: Prompt) -> PromptIds:
        parts = (prompt.prefix, prompt.question, prompt.bridge, prompt.memory, prompt.suffix)
        return PromptIds(*map(self._encode, parts))

    def pieces(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        return tuple(id for piece in pieces for id in self._encode(piece.text))

    def reply(self, ids: Sequence[int]) -> Reply:
        return Reply(words(ids), Finish.LENGTH)

    def transcript(self, ids: Sequence[int]) -> str:
        return words(ids)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split()))


class EmptyIndex:
    """Finds the same passage for everything: the observations are in the plans."""

    def search(self, queries: Sequence[str], top_n: int) -> list[list[Passage]]:
        return [[Passage("0", "")] for _ in queries]
