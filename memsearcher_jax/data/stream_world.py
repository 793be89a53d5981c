"""Streams for Mem-alpha that ship with the package, drawn from a seed: people, dated events, facts, rules of classes.

A chunk is one day: its date, then sentences in any order, of which some say nothing. Whatever is asked is said in one
sentence of one chunk, and every sentence has a subject that no other sentence of any stream has, in neither split: what
a policy has learnt of one stream answers no question about another.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import date, timedelta

from memsearcher_jax.agent.types import Problem, Stream, StreamQuestion
from memsearcher_jax.data.names import Names

SOURCE = "generated"
KINDS = ("person", "event", "fact", "rule")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
FIRST_DAY = date(2030, 1, 1)
CLASSES = 5  # labels of one stream
_IDLE = (
    "It rained until noon.",
    "Nothing else was heard that day.",
    "The evening was long and quiet.",
    "Somebody laughed in the next room.",
    "The train was late again.",
    "There was bread and soup.",
)


@dataclass(frozen=True)
class StreamConfig:
    """Size and seed of the generated streams."""

    seed: int = 0
    """Another seed is other streams: other names, other days, other questions."""
    train_streams: int = 64
    """Streams to train on."""
    test_streams: int = 12
    """Streams to test on; they take the lengths of test_chunks in turn."""
    train_chunks: int = 10
    """Chunks of a stream to train on."""
    test_chunks: tuple[int, ...] = (10, 50, 130, 200)
    """Chunks of the streams to test on."""
    facts: int = 4
    """Sentences of a chunk that can be asked about: as many of each kind as of the next, over the stream."""
    idle: int = 2
    """Sentences of a chunk that say nothing."""
    questions: int = 12
    """Questions about a stream, spread evenly over the kinds and at random over its chunks."""


@dataclass(frozen=True)
class Statement:
    """One sentence, and what can be asked about it."""

    text: str
    question: StreamQuestion


def make_streams(config: StreamConfig) -> dict[str, tuple[Problem, ...]]:
    """The streams of both splits as problems, the same in every process.

    Raises ValueError where a stream has fewer sentences than questions.
    """
    names = Names(_rng(config.seed, "names"), syllables=2)
    lengths = {
        "train": [config.train_chunks] * config.train_streams,
        "test": [config.test_chunks[number % len(config.test_chunks)] for number in range(config.test_streams)],
    }
    return {
        split: tuple(
            _stream(config, _rng(config.seed, split, str(number)), names, chunks).problem(f"{split}_{number}")
            for number, chunks in enumerate(several)
        )
        for split, several in lengths.items()
    }


def _rng(seed: int, *names: str) -> random.Random:
    """A stream of draws of its own for each purpose; `random.Random` hashes text the same in every process."""
    return random.Random("/".join((str(seed), "streams", *names)))


def _stream(config: StreamConfig, rng: random.Random, names: Names, chunks: int) -> Stream:
    if config.questions > chunks * config.facts:
        raise ValueError(
            f"data.streams.questions is {config.questions}, but a stream of {chunks} chunks has "
            f"{chunks * config.facts} sentences to ask about: lower it or raise data.streams.facts"
        )
    # The draws of names advance one generator for all streams; those of a stream are its own.
    labels = [names.surname().lower() for _ in range(CLASSES)]
    towns = [names.surname() for _ in range(CLASSES)]
    texts, said = [], {kind: [] for kind in KINDS}
    day = FIRST_DAY
    for chunk in range(chunks):
        day += timedelta(days=rng.randint(1, 3))
        kinds = [KINDS[(chunk * config.facts + number) % len(KINDS)] for number in range(config.facts)]
        statements = [_state(kind, rng, names, day, labels, towns) for kind in kinds]
        for kind, statement in zip(kinds, statements, strict=True):
            said[kind].append(statement.question)
        sentences = [*(one.text for one in statements), *(rng.choice(_IDLE) for _ in range(config.idle))]
        rng.shuffle(sentences)
        texts.append(f"{spoken(day)}. {' '.join(sentences)}")
    return Stream(SOURCE, tuple(texts), tuple(_chosen(rng, said, config.questions)))


def _chosen(rng: random.Random, said: dict[str, list[StreamQuestion]], count: int) -> list[StreamQuestion]:
    """So many different questions, one of each kind in turn as long as there are any."""
    left = {kind: rng.sample(questions, len(questions)) for kind, questions in said.items()}
    chosen: list[StreamQuestion] = []
    while len(chosen) < count:
        chosen += [questions.pop() for questions in left.values() if questions][: count - len(chosen)]
    rng.shuffle(chosen)
    return chosen


def _state(kind: str, rng: random.Random, names: Names, day: date, labels: list[str], towns: list[str]) -> Statement:
    """A sentence of this kind with new names."""
    if kind == "person":
        person, firm = names.person(names.surname(), woman=rng.random() < 0.5), names.firm()
        return _statement(kind, f"{person} works for {firm}.", f"Which firm does {person} work for?", firm)
    if kind == "event":
        one, two = (names.person(names.surname(), woman=rng.random() < 0.5) for _ in range(2))
        happened = f"On {spoken(day)} {one} met {two} in {rng.choice(towns)}."
        return _statement(kind, happened, f"On which day did {one} meet {two}?", spoken(day))
    if kind == "fact":
        film, maker = names.film(), names.person(names.surname(), woman=rng.random() < 0.5)
        return _statement(kind, f"{film} was made by {maker}.", f"Who made {film}?", maker)
    topic, label = names.surname().lower(), rng.choice(labels)
    return _statement(
        kind, f"Sample: a letter about {topic}; Label: {label}.", f"Which label has a letter about {topic}?", label
    )


def _statement(kind: str, text: str, question: str, answer: str) -> Statement:
    return Statement(text, StreamQuestion(question, answer, kind))


def spoken(day: date) -> str:
    """Such as 3 May 2030, whatever the locale."""
    return f"{day.day} {MONTHS[day.month - 1]} {day.year}"
