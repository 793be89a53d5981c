"""Demonstrations for Mem-alpha on invented streams, by a script that is imperfect on purpose, and tasks about memories.

The script stores the statements of a chunk (events as episodic items, other statements as semantic items) and lists the
class labels in the core memory. Often it stores only one sentence, which may be filler, and it deletes filler that the
memory shows. Every example is one context, and its memory has a random size up to that of a long stream, so that large
item ids and counts are demonstrated.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from examples.warmstart.record import HELD_OUT_SEED, copies, encode_reply, step_seed, task
from memsearcher_jax.agent.memalpha.memory import Item, Memory
from memsearcher_jax.agent.memalpha.view import EvidenceRetriever, render_memory
from memsearcher_jax.agent.prompts import USER
from memsearcher_jax.data.synthetic.streams import (
    FILLER,
    KINDS,
    LABELS,
    Sentence,
    Statement,
    Story,
    make_stories,
)
from memsearcher_jax.rl.rng import named_rng
from memsearcher_jax.rl.setup import Run
from memsearcher_jax.types import ScoredTrajectory

STORE_ALL, STORE_ONE = "All of it.\n", "A part.\n"
"""Text before the calls that store all statements or one sentence. They differ in the first token: a policy that
imitates both makes one decision per chunk, and can learn from rewards alone to make the other one."""
UNKNOWN = "I do not know."
SEMANTIC = "semantic_memory"
EPISODIC = "episodic_memory"
CORE = "core_memory"
STORIES_PER_STEP = 16
REORDERED_SENTENCES = (4, 13)  # minimum and exclusive maximum
MAX_ITEMS = 400  # in a memory
UNANSWERABLE_PROBABILITY = 0.1  # the memory does not hold the answer to the first question
FILLER_ITEM_PROBABILITY = 0.3  # the latest item is filler
HELD_OUT_COUNT = 96  # examples of each kind
_ITEM = re.compile(r"^\[(\w+)\] (.*)$", re.MULTILINE)
_LABEL = re.compile(r"Label: (.*)\.")
_FIRST_NAME = re.compile(r"(?!The )[A-Z][a-z]+(?= [A-Z])")


@dataclass(frozen=True)
class Errors:
    store_one: float = 0.85  # probability of storing only one sentence of a chunk
    store_filler: float = 0.5  # probability that this sentence is a filler sentence


NO_ERRORS = Errors(store_one=0)


def select_statements(sentences: Sequence[Sentence]) -> list[Statement]:
    return [sentence for sentence in sentences if isinstance(sentence, Statement)]


def reply_to(
    sentences: Sequence[Sentence], shown: str, labels: Sequence[str], errors: Errors, rng: random.Random
) -> str:
    """The script's reply to a chunk of these sentences, where a memory is shown whose core lists the `labels`."""
    statements = select_statements(sentences)
    if rng.random() < errors.store_one:
        filler = [sentence for sentence in sentences if not isinstance(sentence, Statement)]
        candidates = filler if filler and rng.random() < errors.store_filler else statements
        return STORE_ONE + store_call(rng.choice(candidates))
    shown_filler = [item for item, text in _ITEM.findall(shown) if text in FILLER]  # semantic
    calls = [_call("memory_delete", memory_type=SEMANTIC, memory_id=item) for item in shown_filler]
    calls += map(store_call, statements)
    matches = [_LABEL.search(statement.text) for statement in statements]
    known = dict.fromkeys((*labels, *(match[1] for match in matches if match)))
    if len(known) > len(labels):
        calls.append(_call("memory_update", memory_type=CORE, new_content=core_memory(list(known))))
    return STORE_ALL + "".join(calls)


def store_call(sentence: Sentence) -> str:
    """The call that stores a sentence in the memory of its kind."""
    store = EPISODIC if isinstance(sentence, Statement) and sentence.question.kind == "event" else SEMANTIC
    return _call("new_memory_insert", memory_type=store, content=sentence.text)


def core_memory(labels: Sequence[str]) -> str:
    """The core memory that lists these labels; empty without labels."""
    return f"Labels: {', '.join(labels)}." if labels else ""


def _call(tool: str, **arguments: str) -> str:
    return f"✿FUNCTION✿: {tool}\n✿ARGS✿: {json.dumps(arguments)}\n"


def step(run: Run, number: int) -> list[ScoredTrajectory]:
    """The demonstrations and tasks of a step: from stories whose names occur in no other step."""
    seed = run.config.seed
    tasks = Tasks.open(run, step_seed(seed, number))
    return [
        *(tasks.chunk("chunk", Errors(), slice(None)) for _ in range(40)),
        *tasks.storing(40),
        *tasks.extractions(60),
        *tasks.reorderings(20),
        *tasks.answers(60),
        # The generator's name decides the draws, on which the packaged models depend.
        *copies(run.tokenizer, named_rng(seed, "exercises", number), tasks.chunk_ids(), 60),
    ]


def held_out(run: Run) -> list[ScoredTrajectory]:
    """Storing a chunk, the decision to store all of it, and answers by kind of question."""
    tasks = Tasks.open(run, HELD_OUT_SEED)
    chunks = [tasks.chunk("store_all", NO_ERRORS, slice(1)) for _ in range(HELD_OUT_COUNT)]
    stored = tasks.storing(HELD_OUT_COUNT)
    answers: list[ScoredTrajectory] = []
    for kind in KINDS:
        answers += tasks.answers(HELD_OUT_COUNT // 4, kind)
    return [*stored, *chunks, *answers]


@dataclass(frozen=True)
class Tasks:
    """Generates examples from stories; every call draws new ones from `rng`."""

    run: Run
    stories: Sequence[Story]
    rng: random.Random

    @classmethod
    def open(cls, run: Run, seed: int) -> Tasks:
        """New stories."""
        stories = make_stories(replace(run.config.data.streams, seed=seed), STORIES_PER_STEP)
        return cls(run, stories, random.Random(seed))

    def storing(self, count: int) -> list[ScoredTrajectory]:
        """Replies without errors, whose first line is given and not trained."""
        after_decision = slice(self.run.tokenizer.count(STORE_ALL), None)
        return [self.chunk("calls", NO_ERRORS, after_decision) for _ in range(count)]

    def extractions(self, count: int) -> list[ScoredTrajectory]:
        """Chunks, each followed by the calls that store its statements."""
        encode = self.run.tokenizer.encode_untrusted
        tasks = []
        for _ in range(count):
            story, chunk = self._random_chunk()
            calls = "".join(map(store_call, select_statements(story.sentences_C[chunk])))
            spans = [(encode(story.stream.chunks[chunk] + "\n"), False), (encode(calls), True)]
            tasks.append(task("extraction", self.run.tokenizer, spans))
        return tasks

    def reorderings(self, count: int) -> list[ScoredTrajectory]:
        """Statements, then the same ones in another order. Of the latter, what follows the first name is trained."""
        tokenizer = self.run.tokenizer
        tasks = []
        pool = [statement.text for statement in _statements(self.stories)]
        for _ in range(count):
            texts = self.rng.sample(pool, self.rng.randrange(*REORDERED_SENTENCES))
            spans = [(tokenizer.encode_untrusted(f"{text} "), False) for text in texts]
            for text in self.rng.sample(texts, len(texts)):
                ids = tokenizer.encode_untrusted(f"{text} ")
                first_name = _FIRST_NAME.search(text)
                assert first_name, "every statement contains a person's name"
                given_tokens = tokenizer.count(text[: first_name.end()])
                spans += [(ids[:given_tokens], False), (ids[given_tokens:], True)]
            tasks.append(task("reordering", tokenizer, spans))
        return tasks

    def answers(self, count: int, kind: str = "") -> list[ScoredTrajectory]:
        """Questions about a memory. With a `kind`: one question each, of that kind, whose answer is stored."""
        tasks = []
        for _ in range(count):
            memory, stored = self._random_memory(self.stories)
            candidates = [statement for statement in stored if not kind or statement.question.kind == kind]
            if candidates:
                tasks.append(self._answer(kind, memory, stored, self.rng.choice(candidates)))
        return tasks

    def chunk_ids(self) -> list[int]:
        """The token ids of all chunks, most of which are syllables of names."""
        texts = [" ".join(story.stream.chunks) for story in self.stories]
        return sorted({id for text in texts for id in self.run.tokenizer.encode_untrusted(text)})

    def chunk(self, kind: str, errors: Errors, trained: slice) -> ScoredTrajectory:
        """The script's reply to a chunk, with a memory of other stories; these tokens of the reply are trained."""
        config = self.run.config
        tokenizer = self.run.tokenizer
        story, chunk = self._random_chunk()
        memory, _ = self._random_memory([other for other in self.stories if other is not story])
        known_labels = self._random_subset(list(dict.fromkeys(_labels(_statements([story])))))
        memory = replace(memory, core=core_memory(known_labels))
        shown = render_memory(memory, config.memalpha.shown_items, config.agent.memory_tokens, tokenizer)
        prompt = self.run.agent.prompts.chunk_prompt(shown, story.stream.chunks[chunk])
        written = reply_to(story.sentences_C[chunk], shown, known_labels, errors, self.rng)
        reply = encode_reply(tokenizer, written)
        places = range(len(reply))[trained]
        given = [(ids, False) for ids in tokenizer.prompt(prompt)]
        return task(kind, tokenizer, [*given, *(((id,), place in places) for place, id in enumerate(reply))])

    def _answer(self, kind: str, memory: Memory, stored: Sequence[Statement], first: Statement) -> ScoredTrajectory:
        """A question about `first` or, rarely, about a statement that is not stored.

        Without a `kind`, questions about the other statements in the retrieved evidence follow.
        """
        tokenizer = self.run.tokenizer
        prompts = self.run.agent.prompts
        unanswerable = not kind and self.rng.random() < UNANSWERABLE_PROBABILITY
        if unanswerable:
            first = self.rng.choice([statement for statement in _statements(self.stories) if statement not in stored])
        retriever = EvidenceRetriever(self.stories[0].stream, memory, self.run.config.memalpha, tokenizer)
        evidence = retriever.retrieve(first.question.text)
        prompt = prompts.answer_prompt(evidence, first.question.text)
        answer = UNKNOWN if unanswerable else str(first.question.answer)
        prompt_ids = tuple(chain.from_iterable(tokenizer.prompt(prompt)))
        spans = [(prompt_ids, False), (encode_reply(tokenizer, answer), True)]
        others = [other for other in stored if not kind and other is not first and f". {other.text}" in evidence]
        for statement in self.rng.sample(others, len(others)):
            spans += [(tokenizer.encode_trusted(f"\n{USER}"), False)]
            spans += [(tokenizer.encode_untrusted(statement.question.text), False)]
            spans += [(tokenizer.encode_trusted(prompt["suffix"]), False)]
            spans += [(encode_reply(tokenizer, str(statement.question.answer)), True)]
        return task(f"answer/{kind}" if kind else "answer", tokenizer, spans)

    def _random_chunk(self) -> tuple[Story, int]:
        story = self.rng.choice(self.stories)
        return story, self.rng.randrange(len(story.sentences_C))

    def _random_memory(self, stories: Sequence[Story]) -> tuple[Memory, list[Statement]]:
        """A memory of some statements, whose number is log-uniform, and these statements."""
        statements = _statements(stories)
        max_log = math.log(min(MAX_ITEMS, len(statements)) + 1)
        stored = self.rng.sample(statements, int(math.exp(self.rng.uniform(0, max_log))) - 1)
        # Token counts of items are only used by rewards, which these examples do not have.
        items = [
            (statement.question.kind, Item(f"{number:04x}", statement.text, 0))
            for number, statement in enumerate(stored)
        ]
        if self.rng.random() < FILLER_ITEM_PROBABILITY:
            items.append(("", Item(f"{len(items):04x}", self.rng.choice(FILLER), 0)))
        memory = Memory(core_memory(self._random_subset(_labels(stored)[:LABELS])))
        semantic = memory.semantic.extend(item for kind, item in items if kind != "event")
        episodic = memory.episodic.extend(item for kind, item in items if kind == "event")
        return replace(memory, semantic=semantic, episodic=episodic), stored

    def _random_subset(self, labels: Sequence[str]) -> list[str]:
        return self.rng.sample(labels, self.rng.randint(0, len(labels)))


def _statements(stories: Sequence[Story]) -> list[Statement]:
    return [statement for story in stories for chunk in story.sentences_C for statement in select_statements(chunk)]


def _labels(statements: Sequence[Statement]) -> list[str]:
    return [str(statement.question.answer) for statement in statements if statement.question.kind == "rule"]
