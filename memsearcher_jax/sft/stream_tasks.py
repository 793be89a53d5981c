"""Supervised examples for policies that read streams: demonstrations, question answering and copying.

Each step generates new stories, whose names occur in no other step. Every example is one context, and its memory has a
random size up to that of a long stream, so that large item ids and counts are in the training data.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from memsearcher_jax.agent.memalpha.memory import Item, Memory
from memsearcher_jax.agent.memalpha.prompts import MemalphaPrompts
from memsearcher_jax.agent.memalpha.view import EvidenceRetriever, render_memory
from memsearcher_jax.agent.prompts import USER
from memsearcher_jax.config import RunConfig
from memsearcher_jax.data.synthetic.streams import (
    FILLER,
    KINDS,
    LABELS,
    Statement,
    Story,
    make_stories,
    select_statements,
)
from memsearcher_jax.logs.metrics import Metrics
from memsearcher_jax.rl.rng import named_rng
from memsearcher_jax.rl.setup import Run
from memsearcher_jax.rl.tokenizer import ChatTokenizer
from memsearcher_jax.sft.config import NO_ERRORS, SFTConfig
from memsearcher_jax.sft.examples import (
    HELD_OUT_SEED,
    continuation,
    copy_examples,
    encode_reply,
    join_spans,
    make_example,
    step_seed,
)
from memsearcher_jax.sft.stream_demonstrator import STORE_ALL, StreamDemonstrator, core_memory, store_call
from memsearcher_jax.training.packing import TrainingExample
from memsearcher_jax.types import Generate

STORIES_PER_STEP = 16
REORDERED_SENTENCES = (4, 13)  # minimum and exclusive maximum
MAX_ITEMS = 400  # in a memory
UNKNOWN = "I do not know."
UNANSWERABLE_PROBABILITY = 0.1  # the memory does not hold the answer to the first question
FILLER_ITEM_PROBABILITY = 0.3  # the latest item is filler
HELD_OUT_COUNT = 96  # examples of each kind
_FIRST_NAME = re.compile(r"(?!The )[A-Z][a-z]+(?= [A-Z])")


def step_examples(run: Run, step: int) -> tuple[list[TrainingExample], Metrics]:
    """The examples of a step; there are no metrics of them."""
    config, sft = run.config, run.config.sft
    tasks = make_tasks(run, step_seed(config.seed, step))
    return [
        *tasks.demonstration_examples(sft, config.rl.prompts_per_step),
        *tasks.storing_examples(sft.storing_examples),
        *tasks.extraction_examples(sft.extraction_examples),
        *tasks.reordering_examples(sft.reordering_examples),
        *tasks.qa_examples(sft.qa_examples),
        # The generator's name decides the draws, on which the packaged models depend.
        *copy_examples(named_rng(config.seed, "exercises", step), tasks.chunk_ids(), sft.copy_examples),
    ], {}


def held_out_examples(run: Run) -> dict[str, list[TrainingExample]]:
    """Held-out examples: storing a chunk, the decision to store all of it, and answers by kind of question."""
    tasks = make_tasks(run, HELD_OUT_SEED)
    decisions = []
    for example in tasks.demonstration_examples(NO_ERRORS, HELD_OUT_COUNT):
        first_sampled = np.arange(len(example.ids)) == np.argmax(example.sampled)
        decisions.append(make_example(example.ids, first_sampled))
    return {
        "calls": tasks.storing_examples(HELD_OUT_COUNT),
        "store_all": decisions,
        **{f"answer/{kind}": tasks.qa_examples(HELD_OUT_COUNT // len(KINDS), kind) for kind in KINDS},
    }


def make_tasks(run: Run, seed: int) -> StreamTasks:
    """The tasks over new stories."""
    stories = make_stories(replace(run.config.data.streams, seed=seed), STORIES_PER_STEP)
    assert isinstance(run.prompts, MemalphaPrompts)
    return StreamTasks(run.config, run.tokenizer, run.prompts, stories, random.Random(seed))


@dataclass(frozen=True)
class StreamTasks:
    """Generates examples from stories; every call draws new ones from `rng`."""

    config: RunConfig
    tokenizer: ChatTokenizer
    prompts: MemalphaPrompts
    stories: Sequence[Story]
    rng: random.Random

    def demonstration_examples(self, errors: SFTConfig, count: int) -> list[TrainingExample]:
        """The scripted policy's replies to chunks."""
        return [self._chunk_example(errors, given_tokens=0) for _ in range(count)]

    def storing_examples(self, count: int) -> list[TrainingExample]:
        """Replies without errors, whose first line is given and not trained."""
        given_tokens = self.tokenizer.count(STORE_ALL)
        return [self._chunk_example(NO_ERRORS, given_tokens) for _ in range(count)]

    def extraction_examples(self, count: int) -> list[TrainingExample]:
        """Chunks, each followed by the calls that store its statements."""
        examples = []
        for _ in range(count):
            story, chunk = self._random_chunk()
            calls = "".join(map(store_call, select_statements(story.sentences_C[chunk])))
            examples.append(continuation(self.tokenizer, story.stream.chunks[chunk] + "\n", calls))
        return examples

    def reordering_examples(self, count: int) -> list[TrainingExample]:
        """Statements, then the same ones in another order. Of the latter, what follows the first name is trained."""
        pool = [statement.text for statement in _statements(self.stories)]
        examples = []
        for _ in range(count):
            texts = self.rng.sample(pool, self.rng.randrange(*REORDERED_SENTENCES))
            spans = [(self.tokenizer.encode_untrusted(f"{text} "), False) for text in texts]
            for text in self.rng.sample(texts, len(texts)):
                ids = self.tokenizer.encode_untrusted(f"{text} ")
                first_name = _FIRST_NAME.search(text)
                assert first_name, "every statement contains a person's name"
                given_tokens = self.tokenizer.count(text[: first_name.end()])
                spans += [(ids[:given_tokens], False), (ids[given_tokens:], True)]
            examples.append(join_spans(spans))
        return examples

    def qa_examples(self, count: int, kind: str = "") -> list[TrainingExample]:
        """Questions about a memory. With a `kind`: one question each, of that kind, whose answer is stored."""
        examples = []
        for _ in range(count):
            memory, stored = self._random_memory(self.stories)
            candidates = [statement for statement in stored if not kind or statement.question.kind == kind]
            if candidates:
                first = self.rng.choice(candidates)
                examples.append(self._qa_example(memory, stored, first, single=bool(kind)))
        return examples

    def chunk_ids(self) -> list[int]:
        """The token ids of all chunks, most of which are syllables of names."""
        texts = [" ".join(story.stream.chunks) for story in self.stories]
        return sorted({id for text in texts for id in self.tokenizer.encode_untrusted(text)})

    def _chunk_example(self, errors: SFTConfig, given_tokens: int) -> TrainingExample:
        """A chunk with a memory of other stories. All of the reply but its first `given_tokens` is trained."""
        story, chunk = self._random_chunk()
        memory, _ = self._random_memory([other for other in self.stories if other is not story])
        known_labels = self._random_subset(list(dict.fromkeys(_labels(_statements([story])))))
        memory = replace(memory, core=core_memory(known_labels))
        agent = self.config.agent
        shown = render_memory(memory, self.config.memalpha.shown_items, agent.memory_tokens, self.tokenizer)
        prompt = self.prompts.chunk_prompt(shown, story.stream.chunks[chunk])
        policy = StreamDemonstrator(story, errors, self.rng, chunk, known_labels)
        reply = encode_reply(self.tokenizer, policy(Generate(prompt, agent.completion_tokens)).text)
        context = sum(self.tokenizer.prompt(prompt), ())
        return join_spans([(context, False), (reply[:given_tokens], False), (reply[given_tokens:], True)])

    def _qa_example(
        self, memory: Memory, stored: Sequence[Statement], first: Statement, *, single: bool
    ) -> TrainingExample:
        """A question about `first` or, rarely, about a statement that is not stored.

        Unless it is `single`, questions about the other statements in the retrieved evidence follow.
        """
        unanswerable = not single and self.rng.random() < UNANSWERABLE_PROBABILITY
        if unanswerable:
            first = self.rng.choice([statement for statement in _statements(self.stories) if statement not in stored])
        retriever = EvidenceRetriever(self.stories[0].stream, memory, self.config.memalpha, self.tokenizer)
        evidence = retriever.retrieve(first.question.text)
        prompt = self.prompts.answer_prompt(evidence, first.question.text)
        answer = UNKNOWN if unanswerable else str(first.question.answer)
        spans = [(sum(self.tokenizer.prompt(prompt), ()), False), (encode_reply(self.tokenizer, answer), True)]
        others = [one for one in stored if not single and one is not first and f". {one.text}" in evidence]
        for statement in self.rng.sample(others, len(others)):
            turn = (
                *self.tokenizer.encode_trusted(f"\n{USER}"),
                *self.tokenizer.encode_untrusted(statement.question.text),
                *self.tokenizer.encode_trusted(prompt["suffix"]),
            )
            spans += [(turn, False), (encode_reply(self.tokenizer, str(statement.question.answer)), True)]
        return join_spans(spans)

    def _random_chunk(self) -> tuple[Story, int]:
        story = self.rng.choice(self.stories)
        return story, self.rng.randrange(len(story.sentences_C))

    def _random_memory(self, stories: Sequence[Story]) -> tuple[Memory, list[Statement]]:
        """A memory of some statements, whose number is log-uniform, and these statements."""
        statements = _statements(stories)
        max_log = math.log(min(MAX_ITEMS, len(statements)) + 1)
        stored = self.rng.sample(statements, int(math.exp(self.rng.uniform(0, max_log))) - 1)
        # Token counts of items are only used by rewards, which these examples do not have.
        items = [(one.question.kind, Item(f"{number:04x}", one.text, 0)) for number, one in enumerate(stored)]
        if self.rng.random() < FILLER_ITEM_PROBABILITY:
            items.append(("", Item(f"{len(items):04x}", self.rng.choice(FILLER), 0)))
        memory = Memory(core_memory(self._random_subset(_labels(stored)[:LABELS])))
        semantic = memory.semantic.extend(item for kind, item in items if kind != "event")
        episodic = memory.episodic.extend(item for kind, item in items if kind == "event")
        return replace(memory, semantic=semantic, episodic=episodic), stored

    def _random_subset(self, labels: Sequence[str]) -> list[str]:
        """Any number of the labels in random order."""
        return self.rng.sample(labels, self.rng.randint(0, len(labels)))


def _statements(stories: Sequence[Story]) -> list[Statement]:
    return [statement for story in stories for chunk in story.sentences_C for statement in select_statements(chunk)]


def _labels(statements: Sequence[Statement]) -> list[str]:
    return [str(statement.question.answer) for statement in statements if statement.question.kind == "rule"]
