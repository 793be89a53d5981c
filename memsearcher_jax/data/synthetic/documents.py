"""Long documents with a question each: passages of the embedded encyclopedia in random order.

A document holds the passages that its question needs and others of the encyclopedia, which repeat in documents of more
passages than there are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle, islice

from memsearcher_jax.data.synthetic.encyclopedia import EncyclopediaConfig, make_encyclopedia
from memsearcher_jax.data.synthetic.entity_names import named_random
from memsearcher_jax.data.synthetic.relations import make_passage
from memsearcher_jax.ranges import Count
from memsearcher_jax.types import Problem, Stream


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
    rng = named_random(encyclopedia.seed, "document passages")
    # Each sentence names its subject, since a chunk may begin inside a passage.
    texts = {name: make_passage(rng, entity, named_share=1.0) for name, entity in made.entities.items()}

    def problem(question: Problem, passages: int, split: str) -> Problem:
        rng = named_random(encyclopedia.seed, "document", question.id)
        needed = question.supporting_titles
        others = [name for name in texts if name not in needed]
        chosen = [*needed, *rng.choices(others, k=max(0, passages - len(needed)))]
        rng.shuffle(chosen)
        metadata = question.metadata | ({"source": f"documents_{passages}"} if split == "test" else {})
        stream = Stream("documents", tuple(texts[name] for name in chosen), ())
        return replace(question, metadata=metadata, stream=stream)

    lengths = {"train": [config.train_passages], "test": config.test_passages or (config.train_passages,)}
    problems: dict[str, tuple[Problem, ...]] = {}
    for split, questions in (("train", made.train), ("test", made.test)):
        counts = list(islice(cycle(lengths[split]), len(questions)))
        problems[split] = tuple(
            problem(question, count, split) for question, count in zip(questions, counts, strict=True)
        )
    return problems
