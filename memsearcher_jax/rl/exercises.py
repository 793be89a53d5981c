"""Exercises for a warm start, mixed with the demonstrations from the first step on.

In a demonstration a handful of tokens is copied, and a model of a million weights finds out late how. Here nearly all
are: a run of tokens that comes twice, and a passage whose facts are all restated. And whoever answers early is seldom
seen with two of three facts, and must tell that apart from knowing all: here any number of them stands in the memory.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from memsearcher_jax.agent.prompts import Prompts
from memsearcher_jax.data.demonstrator import Demonstrator, Errors
from memsearcher_jax.data.language import RELATION
from memsearcher_jax.data.world import World
from memsearcher_jax.rl.tokens import ChatTokenizer
from memsearcher_jax.training.rows import Sample

RUN = (2, 12)  # tokens of a run that comes twice: at least, fewer than


def copies(
    rng: np.random.Generator, tokenizer: ChatTokenizer, count: int, ids: Sequence[int] = (), run: tuple[int, int] = RUN
) -> list[Sample]:
    """Random runs of tokens, each twice. All of the second that can be known is trained: what follows its first.

    Of these ids, else of all that there are.
    """
    ordinary = np.array(ids) if len(ids) else np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.stop_ids)
    samples = []
    for _ in range(count):
        run_ids = rng.choice(ordinary, int(rng.integers(*run)))
        samples.append(_sample(np.tile(run_ids, 2), known=len(run_ids) + 1))
    return samples


def recitations(rng: np.random.Generator, tokenizer: ChatTokenizer, world: World, count: int) -> list[Sample]:
    """Passages of the world, drawn without repetition, and behind each its facts as a memory states them, in any order.

    The facts are trained.
    """
    chosen = rng.choice(len(world.passages), min(count, len(world.passages)), replace=False)
    shuffle = random.Random(int(rng.integers(2**63))).shuffle
    samples = []
    for row in chosen:
        passage = world.passages[row]
        facts = list(world.entities[passage.title].relations.items())
        shuffle(facts)
        told = " ".join(f"{RELATION[name].phrase.format(x=passage.title)} is {value}." for name, value in facts)
        read = tokenizer.encode_outside(passage.contents + "\n")
        samples.append(_sample(np.array([*read, *tokenizer.encode_outside(told)]), known=len(read)))
    return samples


def decisions(
    rng: np.random.Generator, tokenizer: ChatTokenizer, prompts: Prompts, world: World, errors: Errors, count: int
) -> list[Sample]:
    """How the scripted agent begins a turn, errors included, with a memory that is right as far as it goes.

    One question of the world each, drawn without repetition, and any number of its facts but none.
    """
    problems = (*world.train, *world.test)
    samples = []
    for row in rng.choice(len(problems), min(count, len(problems)), replace=False):
        problem = problems[row]
        chain = [*problem.metadata["supporting_titles"], *problem.golden_answers]
        path = chain[: int(rng.integers(2, len(chain) + 1))]
        script = Demonstrator(problem, world, errors, random.Random(int(rng.integers(2**63))), path)
        read = sum(tokenizer.prompt(prompts.opening(problem.question, script.known())).parts, ())
        said = (*tokenizer.encode_outside(script.act()), tokenizer.end_ids[0])
        samples.append(_sample(np.array([*read, *said]), known=len(read)))
    return samples


def _sample(ids: np.ndarray, *, known: int) -> Sample:
    """Trained from position `known` on."""
    return Sample(ids.astype(np.int32), np.zeros(len(ids), np.float32), np.arange(len(ids)) >= known, 1.0)
