"""A seeded workload of search trajectories with forced lengths; a text is a tuple of token ids."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

# Approximate tokens of the fixed segments of the published prompt.
SYSTEM = 449
BRIDGE = 4
SUFFIX = 6
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

    system = ids(SYSTEM)
    bridge = ids(BRIDGE)
    suffix = ids(SUFFIX)
    questions = [ids(int(rng.integers(20, 61))) for _ in range(-(-trajectories // rollouts))]
    return [
        Plan(system + questions[number // rollouts] + bridge, suffix, tuple(turn() for _ in range(rng.integers(1, 7))))
        for number in range(trajectories)
    ]


@dataclass(frozen=True)
class PlannedContext:
    """One context as a trajectory leaves it; arrays have one entry per token."""

    trajectory: int
    turn: int
    ids: np.ndarray  # int32
    sampled: np.ndarray  # bool


def planned_contexts(
    trajectories: int, rollouts: int, vocab_size: int, rng: np.random.Generator
) -> Iterator[PlannedContext]:
    """The contexts of a workload, in the order of trajectories and turns, with random ids in the replies."""
    for trajectory, plan in enumerate(make_workload(trajectories, rollouts, vocab_size)):
        memory: Ids = ()
        for number, turn in enumerate(plan.turns):
            prompt = plan.prompt(memory)
            memory = tuple(rng.integers(0, vocab_size, turn.memory).tolist())
            spans = [(prompt, False), (rng.integers(0, vocab_size, turn.think), True)]
            if turn is not plan.turns[-1]:
                spans += [(turn.observation, False), (memory, True)]
            ids = np.concatenate([np.asarray(span, np.int32) for span, _ in spans])
            sampled = np.concatenate([np.full(len(span), is_sampled) for span, is_sampled in spans])
            yield PlannedContext(trajectory, number, ids, sampled)


@dataclass(frozen=True)
class PackingSeconds:
    """CPU seconds of packing the contexts of one step."""

    contexts: int
    tokens: int  # of all contexts
    before_the_first_update: float  # merging equal examples, planning the rows, filling those of the first mini-batch
    total: float  # with the rows of the others, which are filled while the first mini-batch trains


def packing_seconds(trajectories: int = 1_280, vocab_size: int = 150_000) -> PackingSeconds:
    """Packs the contexts of one step as the trainer does, with the settings of the paper: 1,280 make some 4,480."""
    from memsearcher_jax.training.packing import TrainingExample, merge_equal, plan_rows

    rng = np.random.default_rng(0)
    examples = []
    for planned in planned_contexts(trajectories, 5, vocab_size, rng):
        logprobs = np.where(planned.sampled, -rng.random(len(planned.ids)), 0).astype(np.float32)
        advantage = float(planned.trajectory % 5 - 2)
        examples.append(TrainingExample(planned.ids, logprobs, planned.sampled, advantage, number=planned.turn))
    began = time.process_time()
    rows = plan_rows(merge_equal(examples), 8_192, 256, rng, microbatches=8, minibatch_contexts=640)
    rows.of_minibatch(0).batch()
    first_is_filled = time.process_time()
    for number in range(1, rows.minibatches):
        rows.of_minibatch(number).batch()
    ended = time.process_time()
    tokens = sum(len(example.ids) for example in examples)
    return PackingSeconds(len(examples), tokens, first_is_filled - began, ended - began)
