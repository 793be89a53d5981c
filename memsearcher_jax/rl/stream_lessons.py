"""What a warm start learns of reading streams: a scripted policy's replies, how questions are answered, and copying.

Every step has stories of its own, with names that no other step has. A lesson is one context:

- a demonstration: a chunk, with a memory that another policy could have left, and the script's reply, errors included;
- a reading: likewise without errors, and the first words, in which the script decides, are given and not trained;
- a recitation: a chunk and its calls alone, where nearly all is copied, as in the exercise that is a run said twice;
- a repetition: sentences, and the same in another order: once the first word of its first name has come, each is known;
- an interview: what a search finds in a memory for a question, the answer, then other questions that it answers too.

Memories have any size from empty to that of a long stream, so that large ids and counts are nothing new later.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from memsearcher_jax.agent.memalpha_memory import Item, Memory
from memsearcher_jax.agent.memalpha_prompts import MemalphaPrompts
from memsearcher_jax.agent.memalpha_view import Reader, shown_memory
from memsearcher_jax.agent.prompts import USER
from memsearcher_jax.agent.types import Say
from memsearcher_jax.config import RunConfig
from memsearcher_jax.data.stream_demonstrator import WHOLE, StreamDemonstrator, StreamErrors, core_of, stored
from memsearcher_jax.data.stream_world import CLASSES, IDLE, KINDS, Sentence, Story, make_stories
from memsearcher_jax.report.metrics import Metrics
from memsearcher_jax.rl import build
from memsearcher_jax.rl.exercises import copies
from memsearcher_jax.rl.keys import numpy_rng
from memsearcher_jax.rl.tokens import ChatTokenizer
from memsearcher_jax.training.rows import Sample

FIRST_STORIES = 1_000  # lower seeds are the streams that policies are trained and tested with
HELD_OUT = 999
STORIES_OF_A_SEED = 1_000_000
STORIES = 16  # of one step
RUN = (2, 12)  # tokens of a run that comes twice: at least, fewer than
REPEATED = (4, 13)  # sentences of a repetition: at least, fewer than
LARGEST = 400  # items of a memory
UNKNOWN = "I do not know."
NOT_STORED = 0.1  # of interviews: the first question is about what the memory does not hold
LEFT_IDLE = 0.3  # of memories: the latest item is an idle one
MEASURED = 96  # contexts of each kind
_FIRST_NAME = re.compile(r"(?!The )[A-Z][a-z]+(?= [A-Z])")


@dataclass(frozen=True)
class StreamLessons:
    """The lessons of a run whose workflow reads streams."""

    run: build.Run

    def of_step(self, step: int) -> tuple[list[Sample], Metrics]:
        """The samples of a step, the same whenever it is asked for. There are no numbers about them."""
        config, settings = self.run.config, self.run.config.demonstrations
        school = self._school(FIRST_STORIES + config.seed * STORIES_OF_A_SEED + step)
        errors = StreamErrors(settings.keep_part, settings.keep_idle)
        return [
            *school.demonstrations(errors, config.rl.problems),
            *school.readings(settings.readings),
            *school.recitations(settings.recitations),
            *school.repetitions(settings.repetitions),
            *school.interviews(settings.interviews),
            *school.copies(numpy_rng(config.seed, "exercises", step), settings.copies),
        ], {}

    def measured(self) -> dict[str, list[Sample]]:
        """All calls of a faultless reply together, the words that it begins with, and answers by kind of question."""
        school = self._school(HELD_OUT)
        faultless = school.demonstrations(StreamErrors(keep_part=0), MEASURED)
        return {
            "calls": school.readings(MEASURED),
            "whole": [_first_token(sample) for sample in faultless],
            **{f"answer/{kind}": school.interviews(MEASURED // len(KINDS), kind) for kind in KINDS},
        }

    def _school(self, seed: int) -> School:
        stories = make_stories(replace(self.run.config.data.streams, seed=seed), STORIES)
        return School(self.run.config, self.run.tokenizer, self.run.prompts, stories, random.Random(seed))


@dataclass(frozen=True)
class School:
    """Stories, and what can be taught with them; each call draws other lessons."""

    config: RunConfig
    tokenizer: ChatTokenizer
    prompts: MemalphaPrompts
    stories: Sequence[Story]
    rng: random.Random

    def demonstrations(self, errors: StreamErrors, count: int) -> list[Sample]:
        """The script's replies to chunks."""
        return [self._reading(errors, given=0) for _ in range(count)]

    def readings(self, count: int) -> list[Sample]:
        """Faultless replies whose first words are given."""
        given = self.tokenizer.count(WHOLE)
        return [self._reading(StreamErrors(keep_part=0), given) for _ in range(count)]

    def recitations(self, count: int) -> list[Sample]:
        """Chunks of the stories, and behind each the calls that store what can be asked about it."""
        samples = []
        for _ in range(count):
            story = self.rng.choice(self.stories)
            chunk = self.rng.randrange(len(story.sentences_C))
            calls = "".join(stored(one) for one in story.sentences_C[chunk] if one.question)
            read = self.tokenizer.encode_outside(story.stream.chunks[chunk] + "\n")
            samples.append(_sample([(read, False), (self.tokenizer.encode_outside(calls), True)]))
        return samples

    def repetitions(self, count: int) -> list[Sample]:
        """Sentences of all stories, each twice; of the second time is trained what its first name tells."""
        pool = [one.text for story in self.stories for one in _asked(story)]
        samples = []
        for _ in range(count):
            told = self.rng.sample(pool, self.rng.randrange(*REPEATED))
            parts = [(self.tokenizer.encode_outside(f"{text} "), False) for text in told]
            for text in self.rng.sample(told, len(told)):
                ids = self.tokenizer.encode_outside(f"{text} ")
                given = self.tokenizer.count(text[: _FIRST_NAME.search(text).end()])
                parts += [(ids[:given], False), (ids[given:], True)]
            samples.append(_sample(parts))
        return samples

    def copies(self, rng: np.random.Generator, count: int) -> list[Sample]:
        """Random runs of what the chunks are made of, mostly names, each twice."""
        ids = sorted({id for one in self.stories for id in self.tokenizer.encode_outside(" ".join(one.stream.chunks))})
        return copies(rng, self.tokenizer, count, ids, RUN)

    def interviews(self, count: int, kind: str = "") -> list[Sample]:
        """Contexts of questions. With a `kind`: one question each, of that kind, whose answer is stored."""
        samples = []
        for _ in range(count):
            memory, held = self._memory([one for story in self.stories for one in _asked(story)])
            first = [one for one in held if not kind or one.question.kind == kind]
            if first:
                samples.append(self._interview(memory, held, self.rng.choice(first), alone=bool(kind)))
        return samples

    def _reading(self, errors: StreamErrors, given: int) -> Sample:
        """A chunk with a memory of other stories, and all of the reply but its first `given` tokens trained."""
        story = self.rng.choice(self.stories)
        chunk = self.rng.randrange(len(story.sentences_C))
        memory, _ = self._memory([one for other in self.stories if other is not story for one in _asked(other)])
        known = self._some(_labels(story))
        memory = replace(memory, core=core_of(known))
        shown = shown_memory(memory, self.config.memalpha.shown_items, self.config.agent.memory_tokens, self.tokenizer)
        prompt = self.prompts.chunk(shown, story.stream.chunks[chunk])
        script = StreamDemonstrator(story, errors, self.rng, read=chunk, labels=known)
        said = self._said(script(Say(prompt, self.config.agent.reply_tokens)).text)
        read = sum(self.tokenizer.prompt(prompt).parts, ())
        return _sample([(read, False), (said[:given], False), (said[given:], True)])

    def _interview(self, memory: Memory, held: Sequence[Sentence], first: Sentence, *, alone: bool) -> Sample:
        """A question about `first`, seldom about something else that nobody stored, and unless it is `alone` others."""
        missing = not alone and self.rng.random() < NOT_STORED
        if missing:
            first = self.rng.choice([one for story in self.stories for one in _asked(story) if one not in held])
        view = Reader(self.stories[0].stream, memory, self.config.memalpha, self.tokenizer).about(first.question.text)
        prompt = self.prompts.answer(view, first.question.text)
        answer = UNKNOWN if missing else str(first.question.answer)
        parts = [(sum(self.tokenizer.prompt(prompt).parts, ()), False), (self._said(answer), True)]
        others = [] if alone else [one for one in held if one is not first and f". {one.text}" in view]
        for one in self.rng.sample(others, len(others)):
            turn = (
                *self.tokenizer.encode_template(f"\n{USER}"),
                *self.tokenizer.encode_outside(one.question.text),
                *self.tokenizer.encode_template(prompt.suffix),
            )
            parts += [(turn, False), (self._said(str(one.question.answer)), True)]
        return _sample(parts)

    def _memory(self, sentences: Sequence[Sentence]) -> tuple[Memory, list[Sentence]]:
        """Some of the sentences as items, as many as a short or a long stream leaves, and which they are."""
        most = math.log(min(LARGEST, len(sentences)) + 1)
        held = self.rng.sample(sentences, int(math.exp(self.rng.uniform(0, most))) - 1)
        # Lengths only matter where memories are measured, and these are not.
        items = [(one.question.kind, Item(f"{number:04x}", one.text, 0)) for number, one in enumerate(held)]
        if self.rng.random() < LEFT_IDLE:
            items.append(("", Item(f"{len(items):04x}", self.rng.choice(IDLE), 0)))
        semantic = tuple(item for kind, item in items if kind != "event")
        episodic = tuple(item for kind, item in items if kind == "event")
        labels = self._some([str(one.question.answer) for one in held if one.question.kind == "rule"][:CLASSES])
        return Memory(core_of(labels), semantic=semantic, episodic=episodic), held

    def _some(self, labels: Sequence[str]) -> list[str]:
        """The first few of the labels in another order, or none or all."""
        return self.rng.sample(labels, self.rng.randint(0, len(labels)))

    def _said(self, text: str) -> tuple[int, ...]:
        return (*self.tokenizer.encode_outside(text), self.tokenizer.end_ids[0])


def _asked(story: Story) -> list[Sentence]:
    return [one for sentences in story.sentences_C for one in sentences if one.question]


def _labels(story: Story) -> list[str]:
    return list(dict.fromkeys(str(one.question.answer) for one in _asked(story) if one.question.kind == "rule"))


def _first_token(sample: Sample) -> Sample:
    """The first trained token alone."""
    mask = np.zeros(len(sample.ids), bool)
    mask[int(np.argmax(sample.sampled))] = True
    return replace(sample, sampled=mask)


def _sample(parts: Sequence[tuple[Sequence[int], bool]]) -> Sample:
    """The parts joined, of which some are trained."""
    ids = np.concatenate([np.array(ids, np.int32) for ids, _ in parts])
    mask = np.concatenate([np.full(len(ids), trained) for ids, trained in parts])
    return Sample(ids, np.zeros(len(ids), np.float32), mask, 1.0)
