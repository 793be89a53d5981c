"""Synthetic streams for Mem-alpha, generated from a seed.

A chunk describes one day: its date, then statements and filler sentences in random order. Every question is answered by
one statement of one chunk, and the subject of a statement occurs in no other statement of any stream of either split,
so that knowledge of one stream answers no question about another.

Subjects and most answers are people, whose first names and surnames have one syllable each: with one token per syllable
a name is two tokens, which a small model learns to copy quickly. Surnames recur, full names do not, and no full name is
part of another one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import cycle, islice

from memsearcher_jax.data.synthetic.entity_names import THINGS, NameGenerator, named_random
from memsearcher_jax.ranges import Count, CountOrZero, Seed
from memsearcher_jax.types import Problem, Stream, StreamQuestion

SOURCE = "generated"
KINDS = ("person", "event", "fact", "rule")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
FIRST_DAY = date(2030, 1, 1)
MAX_DAYS_BETWEEN_CHUNKS = 3
LABELS = 5  # class labels per stream
FILLER = (
    "It rained until noon.",
    "Nothing else was heard that day.",
    "The evening was long and quiet.",
    "Somebody laughed in the next room.",
    "The train was late again.",
    "There was bread and soup.",
)


@dataclass(frozen=True)
class SyntheticStreamConfig:
    """Seed, number and lengths of the generated streams."""

    seed: Seed = 0
    """Seed of the names, dates and questions."""
    train_streams: CountOrZero = 64
    """Training streams."""
    test_streams: CountOrZero = 12
    """Test streams; they cycle through the lengths in test_chunks."""
    train_chunks: Count = 10
    """Chunks of a training stream."""
    test_chunks: tuple[Count, ...] = (10, 50, 130, 200)
    """Chunks of the test streams."""
    span_days: CountOrZero = 0
    """Each stream starts on a random day, early enough to end within this many days of the first one: short streams
    then cover the months and years of long ones. 0: all streams start on the first day."""
    statements: Count = 4
    """Statements per chunk that can be asked about, of each kind in turn."""
    filler: CountOrZero = 2
    """Filler sentences per chunk."""
    questions: Count = 12
    """Questions per stream, distributed evenly over the kinds and at random over the chunks."""


@dataclass(frozen=True)
class Sentence:
    """A sentence of a chunk: filler, unless it is a `Statement`."""

    text: str


@dataclass(frozen=True)
class Statement(Sentence):
    question: StreamQuestion


@dataclass(frozen=True)
class Story:
    """A stream, and the sentences of each chunk without its date."""

    stream: Stream
    sentences_C: tuple[tuple[Sentence, ...], ...]


def make_streams(config: SyntheticStreamConfig) -> dict[str, tuple[Problem, ...]]:
    """The problems of both splits.

    Raises ValueError if a stream has fewer statements than questions, or the test streams have no lengths.
    """
    if config.test_streams and not config.test_chunks:
        raise ValueError("data.streams.test_chunks is empty: give the lengths of the test streams")
    names = NameGenerator(named_random(config.seed, "streams", "names"))
    lengths = {
        "train": [config.train_chunks] * config.train_streams,
        "test": islice(cycle(config.test_chunks), config.test_streams),
    }

    def problem(split: str, number: int, chunks: int) -> Problem:
        rng = named_random(config.seed, "streams", split, str(number))
        return Problem.of_stream(f"{split}_{number}", _make_story(config, rng, names, chunks).stream)

    problems = {}
    for split, counts in lengths.items():
        problems[split] = tuple(problem(split, number, chunks) for number, chunks in enumerate(counts))
    return problems


def make_stories(config: SyntheticStreamConfig, count: int) -> list[Story]:
    """`count` streams of `train_chunks` chunks that share no full name."""
    names = NameGenerator(named_random(config.seed, "streams", "names"))
    rngs = (named_random(config.seed, "streams", "story", str(number)) for number in range(count))
    return [_make_story(config, rng, names, config.train_chunks) for rng in rngs]


def _make_story(config: SyntheticStreamConfig, rng: random.Random, names: NameGenerator, chunks: int) -> Story:
    """`names` is shared by all streams, so that full names are unique. All other draws come from `rng`."""
    if config.questions > (count := chunks * config.statements):
        reason = f"data.streams.questions is {config.questions}, but a stream of {chunks} chunks has {count} statements"
        raise ValueError(f"{reason} to ask about: lower it or raise data.streams.statements")
    town_names = NameGenerator(rng)
    labels = [town_names.town() for _ in range(LABELS)]
    texts = []
    chunk_sentences = []
    questions: dict[str, list[StreamQuestion]] = {kind: [] for kind in KINDS}
    latest_start = config.span_days - chunks * MAX_DAYS_BETWEEN_CHUNKS
    day = FIRST_DAY + timedelta(days=rng.randrange(latest_start) if latest_start > 0 else 0)
    for chunk in range(chunks):
        day += timedelta(days=rng.randint(1, MAX_DAYS_BETWEEN_CHUNKS))
        sentences: list[Sentence] = []
        for number in range(config.statements):
            kind = KINDS[(chunk * config.statements + number) % len(KINDS)]
            statement = _make_statement(kind, rng, names, day, labels)
            sentences.append(statement)
            questions[kind].append(statement.question)
        sentences += [Sentence(rng.choice(FILLER)) for _ in range(config.filler)]
        rng.shuffle(sentences)
        texts.append(f"{format_date(day)}. {' '.join(sentence.text for sentence in sentences)}")
        chunk_sentences.append(tuple(sentences))
    stream = Stream(SOURCE, tuple(texts), tuple(_select(rng, questions, config.questions)))
    return Story(stream, tuple(chunk_sentences))


def _make_statement(kind: str, rng: random.Random, names: NameGenerator, day: date, labels: list[str]) -> Statement:
    def person() -> str:
        # The surname comes from a fresh generator, so that surnames can recur: only the full name must be new.
        return names.person(NameGenerator(rng).surname(), woman=rng.random() < 0.5)

    def statement(text: str, question: str, answer: str) -> Statement:
        return Statement(text, StreamQuestion(question, answer, kind))

    subject = person()
    other = person()
    if kind == "person":
        return statement(f"{subject} works for {other}.", f"Who does {subject} work for?", other)
    if kind == "event":
        when = format_date(day)
        return statement(f"On {when} {subject} met {other}.", f"On which day did {subject} meet {other}?", when)
    if kind == "fact":
        film = f"The {rng.choice(THINGS)} of {subject}"
        return statement(f"{film} was made by {other}.", f"Who made {film}?", other)
    label = rng.choice(labels)
    text = f"Sample: a letter about {subject}; Label: {label}."
    return statement(text, f"Which label has a letter about {subject}?", label)


def _select(rng: random.Random, questions: dict[str, list[StreamQuestion]], count: int) -> list[StreamQuestion]:
    """`count` different questions in random order, taken from each kind in turn until it runs out."""
    remaining = {kind: rng.sample(pool, len(pool)) for kind, pool in questions.items()}
    selected: list[StreamQuestion] = []
    while len(selected) < count:
        selected += [pool.pop() for pool in remaining.values() if pool][: count - len(selected)]
    rng.shuffle(selected)
    return selected


def format_date(day: date) -> str:
    """A date such as "3 May 2030", independent of the locale."""
    return f"{day.day} {MONTHS[day.month - 1]} {day.year}"
