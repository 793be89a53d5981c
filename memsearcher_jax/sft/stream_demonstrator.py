"""A scripted policy that reads synthetic streams for Mem-alpha, imperfect on purpose.

It stores the statements of a chunk (events as episodic items, other statements as semantic items) and lists the class
labels in the core memory. Often it stores only one sentence, which may be filler, and it deletes filler that the memory
shows.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from memsearcher_jax.data.synthetic.streams import FILLER, Sentence, Statement, Story, select_statements
from memsearcher_jax.sft.config import SFTConfig
from memsearcher_jax.types import Completion, Generate, Prompt

STORE_ALL, STORE_ONE = "All of it.\n", "A part.\n"
"""Text before the calls that store all statements or one sentence. They differ in the first token: a policy that
imitates both makes one decision per chunk, and can learn from rewards alone to make the other one."""

SEMANTIC, EPISODIC, CORE = "semantic_memory", "episodic_memory", "core_memory"
_ITEM = re.compile(r"^\[(\w+)\] (.*)$", re.MULTILINE)
_LABEL = re.compile(r"Label: (.*)\.")


@dataclass
class StreamDemonstrator:
    """The policy for one story. Each call reads the next chunk."""

    story: Story
    errors: SFTConfig
    rng: random.Random
    chunk: int = 0  # the next one
    labels: list[str] = field(default_factory=list)  # in the core memory

    def __call__(self, request: Generate) -> Completion:
        assert isinstance(request.text, Prompt), "every chunk is read in a new context"
        sentences = self.story.sentences_C[self.chunk]
        self.chunk += 1
        statements = select_statements(sentences)
        if self.rng.random() < self.errors.store_one:
            filler = [sentence for sentence in sentences if not isinstance(sentence, Statement)]
            candidates = filler if filler and self.rng.random() < self.errors.store_filler else statements
            return Completion(STORE_ONE + store_call(self.rng.choice(candidates)))
        deletions = self._delete_filler(request.text["memory"])
        insertions = "".join(map(store_call, statements))
        return Completion(STORE_ALL + deletions + insertions + self._update_labels(statements))

    def _delete_filler(self, shown_memory: str) -> str:
        """Calls that delete the filler items in the shown memory, all of which are semantic."""
        filler = [item for item, text in _ITEM.findall(shown_memory) if text in FILLER]
        return "".join(_call("memory_delete", memory_type=SEMANTIC, memory_id=item) for item in filler)

    def _update_labels(self, statements: list[Statement]) -> str:
        """The call that rewrites the core memory, if the statements contain a new label."""
        labels = [match[1] for statement in statements if (match := _LABEL.search(statement.text))]
        new = [label for label in dict.fromkeys(labels) if label not in self.labels]
        self.labels += new
        return _call("memory_update", memory_type=CORE, new_content=core_memory(self.labels)) if new else ""


def store_call(sentence: Sentence) -> str:
    """The call that stores a sentence in the memory of its kind."""
    store = EPISODIC if isinstance(sentence, Statement) and sentence.question.kind == "event" else SEMANTIC
    return _call("new_memory_insert", memory_type=store, content=sentence.text)


def core_memory(labels: Sequence[str]) -> str:
    """The core memory that lists these labels; empty without labels."""
    return f"Labels: {', '.join(labels)}." if labels else ""


def _call(tool: str, **arguments: str) -> str:
    return f"✿FUNCTION✿: {tool}\n✿ARGS✿: {json.dumps(arguments)}\n"
