"""Streams for Mem-alpha that ship with the package, drawn from a seed: people, dated events, facts, rules of classes.

A chunk is one day: its date, then sentences in any order, of which some say nothing. Whatever is asked is said in one
sentence of one chunk, and every sentence has a subject that no other sentence of any stream has, in neither split: what
a policy has learnt of one stream answers no question about another.

Subjects and most answers are people, who have a first name and a surname of one syllable each: where each syllable is
one token, a name is two tokens that a small model learns to copy soon. A surname alone recurs; a full name does not,
and it is never found inside another, since a longer name grows at its beginning and goes on in small letters.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import date, timedelta

from memsearcher_jax.agent.types import Problem, Stream, StreamQuestion
from memsearcher_jax.data.names import THINGS, Names

SOURCE = "generated"
KINDS = ("person", "event", "fact", "rule")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
FIRST_DAY = date(2030, 1, 1)
LONGEST_PAUSE = 3  # days from a chunk to the next one
CLASSES = 5  # labels of one stream
IDLE = (
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
    span: int = 0
    """Days, from the first one on, within which every stream begins on a day of its own, as early as is needed to end
    there: short streams then know all months and years of long ones. 0: all begin on the first day."""
    facts: int = 4
    """Sentences of a chunk that can be asked about: as many of each kind as of the next, over the stream."""
    idle: int = 2
    """Sentences of a chunk that say nothing."""
    questions: int = 12
    """Questions about a stream, spread evenly over the kinds and at random over its chunks."""


@dataclass(frozen=True)
class Sentence:
    """One sentence of a chunk, and what can be asked about it: nothing about an idle one."""

    text: str
    question: StreamQuestion | None = None


@dataclass(frozen=True)
class Story:
    """A stream of which it is known what each chunk says."""

    dates_C: tuple[str, ...]
    sentences_C: tuple[tuple[Sentence, ...], ...]
    questions: tuple[StreamQuestion, ...]

    @property
    def stream(self) -> Stream:
        """What a policy sees of it."""
        told = zip(self.dates_C, self.sentences_C, strict=True)
        chunks = tuple(f"{day}. {' '.join(one.text for one in sentences)}" for day, sentences in told)
        return Stream(SOURCE, chunks, self.questions)


def make_streams(config: StreamConfig) -> dict[str, tuple[Problem, ...]]:
    """The streams of both splits as problems, the same in every process.

    Raises ValueError where a stream has fewer sentences than questions.
    """
    names = Names(_rng(config.seed, "names"))
    lengths = {
        "train": [config.train_chunks] * config.train_streams,
        "test": [config.test_chunks[number % len(config.test_chunks)] for number in range(config.test_streams)],
    }
    return {
        split: tuple(
            _story(config, _rng(config.seed, split, str(number)), names, chunks).stream.problem(f"{split}_{number}")
            for number, chunks in enumerate(several)
        )
        for split, several in lengths.items()
    }


def make_stories(config: StreamConfig, count: int) -> list[Story]:
    """So many streams of `train_chunks` chunks that share no name, the same in every process."""
    names = Names(_rng(config.seed, "names"))
    return [_story(config, _rng(config.seed, "story", str(one)), names, config.train_chunks) for one in range(count)]


def _rng(seed: int, *names: str) -> random.Random:
    """A stream of draws of its own for each purpose; `random.Random` hashes text the same in every process."""
    return random.Random("/".join((str(seed), "streams", *names)))


def _story(config: StreamConfig, rng: random.Random, names: Names, chunks: int) -> Story:
    if config.questions > chunks * config.facts:
        raise ValueError(
            f"data.streams.questions is {config.questions}, but a stream of {chunks} chunks has "
            f"{chunks * config.facts} sentences to ask about: lower it or raise data.streams.facts"
        )
    # The draws of names advance one generator for all streams; those of a stream are its own.
    towns = Names(rng)
    labels = [towns.town() for _ in range(CLASSES)]
    dates, told, said = [], [], {kind: [] for kind in KINDS}
    latest = config.span - chunks * LONGEST_PAUSE
    day = FIRST_DAY + timedelta(days=rng.randrange(latest) if latest > 0 else 0)
    for chunk in range(chunks):
        day += timedelta(days=rng.randint(1, LONGEST_PAUSE))
        kinds = [KINDS[(chunk * config.facts + number) % len(KINDS)] for number in range(config.facts)]
        statements = [_state(kind, rng, names, day, labels) for kind in kinds]
        for kind, statement in zip(kinds, statements, strict=True):
            said[kind].append(statement.question)
        sentences = [*statements, *(Sentence(rng.choice(IDLE)) for _ in range(config.idle))]
        rng.shuffle(sentences)
        dates.append(spoken(day))
        told.append(tuple(sentences))
    return Story(tuple(dates), tuple(told), tuple(_chosen(rng, said, config.questions)))


def _chosen(rng: random.Random, said: dict[str, list[StreamQuestion]], count: int) -> list[StreamQuestion]:
    """So many different questions, one of each kind in turn as long as there are any."""
    left = {kind: rng.sample(questions, len(questions)) for kind, questions in said.items()}
    chosen: list[StreamQuestion] = []
    while len(chosen) < count:
        chosen += [questions.pop() for questions in left.values() if questions][: count - len(chosen)]
    rng.shuffle(chosen)
    return chosen


def _state(kind: str, rng: random.Random, names: Names, day: date, labels: list[str]) -> Sentence:
    """A sentence of this kind with new names."""

    def person() -> str:
        # Of a generator of its own, so that a surname recurs: only the full name must be new.
        return names.person(Names(rng).surname(), woman=rng.random() < 0.5)

    one, two = person(), person()
    if kind == "person":
        return _sentence(kind, f"{one} works for {two}.", f"Who does {one} work for?", two)
    if kind == "event":
        return _sentence(kind, f"On {spoken(day)} {one} met {two}.", f"On which day did {one} meet {two}?", spoken(day))
    if kind == "fact":
        film = f"The {rng.choice(THINGS)} of {one}"
        return _sentence(kind, f"{film} was made by {two}.", f"Who made {film}?", two)
    label = rng.choice(labels)
    text = f"Sample: a letter about {one}; Label: {label}."
    return _sentence(kind, text, f"Which label has a letter about {one}?", label)


def _sentence(kind: str, text: str, question: str, answer: str) -> Sentence:
    return Sentence(text, StreamQuestion(question, answer, kind))


def spoken(day: date) -> str:
    """Such as 3 May 2030, whatever the locale."""
    return f"{day.day} {MONTHS[day.month - 1]} {day.year}"
