"""Exercises that teach a warm start to copy, mixed with the demonstrations from the first step on.

In a demonstration a handful of tokens is copied, and a model of a million weights finds out late how. Here nearly all
are: a run of tokens that comes twice, and a passage whose facts are all restated.
"""

from __future__ import annotations

import random

import numpy as np

from memsearcher_jax.data.language import RELATION
from memsearcher_jax.data.world import World
from memsearcher_jax.rl.tokens import ChatTokenizer
from memsearcher_jax.training.rows import Sample

RUN = (2, 12)  # tokens of a run that comes twice: at least, fewer than


def copies(rng: np.random.Generator, tokenizer: ChatTokenizer, count: int) -> list[Sample]:
    """Random runs of tokens, each twice. All of the second that can be known is trained: what follows its first."""
    ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.stop_ids)
    samples = []
    for _ in range(count):
        run = rng.choice(ordinary, int(rng.integers(*RUN)))
        samples.append(_sample(np.tile(run, 2), known=len(run) + 1))
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


def _sample(ids: np.ndarray, *, known: int) -> Sample:
    """Trained from position `known` on."""
    return Sample(ids.astype(np.int32), np.zeros(len(ids), np.float32), np.arange(len(ids)) >= known, 1.0)
