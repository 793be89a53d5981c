"""A seeded workload of search trajectories with forced lengths; a text is a tuple of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SYSTEM, BRIDGE, SUFFIX = 449, 4, 6  # approximate tokens of the fixed segments of the published prompt
CONTEXT = 2_400  # tokens of the longest turn, rounded up
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Turn:
    """Lengths of one turn, in tokens. The last turn of a trajectory has only a thought."""

    think: int
    observation: Ids
    memory: int


@dataclass(frozen=True, eq=False)  # a key of dictionaries, by identity
class Plan:
    """One trajectory to generate."""

    before: Ids  # of a prompt, what precedes the memory: system prompt, question, bridge
    after: Ids
    turns: tuple[Turn, ...]

    def prompt(self, memory: Sequence[int]) -> Ids:
        return (*self.before, *memory, *self.after)

    @property
    def generated_tokens(self) -> int:
        return sum(turn.think for turn in self.turns) + sum(turn.memory for turn in self.turns[:-1])


def make_workload(trajectories: int, rollouts: int, vocab_size: int) -> list[Plan]:
    """`trajectories` in groups of `rollouts` that share a question; all lengths are uniform in their range."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> Ids:
        return tuple(rng.integers(0, vocab_size, count).tolist())

    def turn() -> Turn:
        return Turn(int(rng.integers(30, 151)), ids(int(rng.integers(300, 901))), int(rng.integers(50, 401)))

    system, bridge, suffix = ids(SYSTEM), ids(BRIDGE), ids(SUFFIX)
    questions = [ids(int(rng.integers(20, 61))) for _ in range(-(-trajectories // rollouts))]
    return [
        Plan(system + questions[number // rollouts] + bridge, suffix, tuple(turn() for _ in range(rng.integers(1, 7))))
        for number in range(trajectories)
    ]
