"""Trajectories of the scripted agent, in the same form as those of a policy: exact ids, and which of them it said.

Every world is a fresh one, with names that no other world has, so that nothing can be learnt by heart.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from memsearcher_jax.agent.play import play
from memsearcher_jax.agent.types import Context, Find, Found, Problem, Prompt, Reply, Say, Trajectory, Workflow
from memsearcher_jax.data.demonstrator import Demonstrator, Errors
from memsearcher_jax.data.world import World, WorldConfig, make_world
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.search import Searcher, open_searcher
from memsearcher_jax.rl.searches import search_all
from memsearcher_jax.rl.tokens import ChatTokenizer
from memsearcher_jax.training.rows import Sample

FIRST_WORLD = 1_000  # lower seeds are the worlds that policies are trained and tested in, and the small tokenizer's

SLOTS = {
    "query": re.compile(r'"query": "(.*?)"'),
    "fact": re.compile(r".* is (.*?)\.</memory>"),
    "answer": re.compile(r"\\boxed\{(.*?)\}"),
}
"""The names that a reply must copy from its context, as groups of patterns; a fact's is behind the last "is"."""


@dataclass(frozen=True)
class Stage:
    """A world with a search engine over its passages."""

    world: World
    searcher: Searcher


@dataclass
class Recorder:
    """Lets a script speak through the tokenizer and keeps what a sampler would have recorded."""

    tokenizer: ChatTokenizer
    script: Callable[[Say], Reply]
    ids: list[int] = field(default_factory=list)
    spoken: list[bool] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)

    def __call__(self, say: Say) -> Reply:
        if isinstance(say.text, Prompt):
            self.close()
            self._add(sum(self.tokenizer.prompt(say.text).parts, ()), spoken=False)
        else:
            self._add(self.tokenizer.pieces(say.text), spoken=False)
        reply = self.script(say)
        self._add((*self.tokenizer.encode_outside(reply.text), self.tokenizer.end_ids[0]), spoken=True)
        return reply

    def close(self) -> None:
        """The context that is open, if one is, is complete."""
        if self.ids:
            self.contexts.append(Context(tuple(self.ids), (0.0,) * len(self.ids), tuple(self.spoken)))
        self.ids, self.spoken = [], []

    def _add(self, ids: Sequence[int], *, spoken: bool) -> None:
        self.ids += ids
        self.spoken += [spoken] * len(ids)


def open_stage(world: WorldConfig, retrieval: RetrievalConfig) -> Stage:
    """A world and a search engine over it, for one step: the index leaves no file behind."""
    made = make_world(world)
    with tempfile.TemporaryDirectory() as scratch:
        return Stage(made, open_searcher(replace(retrieval, kind="exact"), Path(scratch) / "index", made.passages))


def demonstrate(
    stage: Stage,
    problems: Sequence[Problem],
    errors: Errors,
    make_workflow: Callable[[Problem], Workflow],
    tokenizer: ChatTokenizer,
    rng: np.random.Generator,
) -> list[Trajectory]:
    """One trajectory for each problem of the stage's world, in order; the log-probabilities in them are 0."""
    trajectories = []
    for problem in problems:
        script = Demonstrator(problem, stage.world, errors, random.Random(int(rng.integers(2**63))))
        recorder = Recorder(tokenizer, script)

        def search(find: Find, script: Demonstrator = script) -> tuple[Found, ...]:
            return script.read(find, search_all(stage.searcher, [find])[0])

        outcome = play(make_workflow(problem), recorder, search)
        if outcome.error:
            raise RuntimeError(f"the script failed at problem {problem.id}: {outcome.error}")
        recorder.close()
        transcript = tokenizer.transcript(recorder.contexts[-1].ids)
        trajectories.append(Trajectory(problem, 0, outcome, tuple(recorder.contexts), transcript))
    return trajectories


def samples_of(trajectories: Sequence[Trajectory]) -> list[Sample]:
    """One sample for each context, of what the script said."""
    return [
        Sample(
            ids=np.array(context.ids, np.int32),
            logprobs=np.zeros(len(context.ids), np.float32),
            sampled=np.array(context.sampled),
            advantage=1.0,
        )
        for trajectory in trajectories
        for context in trajectory.contexts
    ]


def slot_samples(trajectories: Sequence[Trajectory], slot: str, tokenizer: ChatTokenizer) -> list[Sample]:
    """Contexts in which the script filled the slot, each with the mask on the slot's tokens alone.

    The contexts are cut behind the slot: what follows does not matter.
    """
    samples = []
    for sample in samples_of(trajectories):
        for start, end in _spoken_runs(sample.sampled):
            text, offsets = tokenizer.decode_with_offsets(sample.ids[start:end])
            if not (filled := SLOTS[slot].search(text)):
                continue
            inside = [first >= filled.start(1) and last <= filled.end(1) for first, last in offsets]
            mask = np.zeros(end, bool)
            mask[start:end] = inside
            samples.append(replace(sample, ids=sample.ids[:end], logprobs=sample.logprobs[:end], sampled=mask))
    return samples


def _spoken_runs(spoken: np.ndarray) -> list[tuple[int, int]]:
    """(start, end) of every unbroken run of the script's own tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], spoken.astype(np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
