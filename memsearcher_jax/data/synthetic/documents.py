"""Long documents with a question each: passages of the embedded encyclopedia in random order.

A document holds the passages that its question needs and others of the encyclopedia, which repeat in documents of more
passages than there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from memsearcher_jax.data.synthetic.encyclopedia import EncyclopediaConfig, make_encyclopedia
from memsearcher_jax.data.synthetic.entity_names import named_random
from memsearcher_jax.ranges import Count
from memsearcher_jax.types import Passage, Problem, Stream


@dataclass(frozen=True)
class DocumentConfig:
    """Lengths of generated documents, for agent.workflow memagent."""

    train_passages: Count = 40
    """Passages of a training document."""
    test_passages: tuple[Count, ...] = (40, 400, 4_000)
    """Passages of the test documents, which cycle through these lengths."""


def make_documents(encyclopedia: EncyclopediaConfig, config: DocumentConfig) -> dict[str, tuple[Problem, ...]]:
    """The problems of both splits; the length is part of a test problem's source."""
    made = make_encyclopedia(encyclopedia)
    by_title = {passage.title: passage for passage in made.passages}

    def problem(question: Problem, passages: int, split: str) -> Problem:
        rng, needed = named_random(encyclopedia.seed, "document", question.id), question.supporting_titles
        others = [passage for passage in made.passages if passage.title not in needed]
        chosen = [*(by_title[title] for title in needed), *rng.choices(others, k=max(0, passages - len(needed)))]
        rng.shuffle(chosen)
        metadata = question.metadata | ({"source": f"documents_{passages}"} if split == "test" else {})
        return replace(question, metadata=metadata, stream=Stream("documents", _texts(chosen), ()))

    lengths = {"train": [config.train_passages], "test": config.test_passages or (config.train_passages,)}
    return {
        split: tuple(problem(one, count, split) for one, count in zip(questions, cycle(lengths[split]), strict=False))
        for split, questions in (("train", made.train), ("test", made.test))
    }


def _texts(passages: Sequence[Passage]) -> tuple[str, ...]:
    return tuple(passage.contents for passage in passages)
