"""Reads streams by a script: what a policy sees how Mem-alpha's stores are kept from, imperfect on purpose.

Of each chunk it stores what can be asked about: events as episodes, all else as facts, and in the core which labels
there are. Often it is content with one sentence of a chunk, at times an idle one; what is idle it deletes when it sees
it again.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from memsearcher_jax.agent.types import Prompt, Reply, Say
from memsearcher_jax.data.stream_world import IDLE, Sentence, Story

WHOLE, PART = "All of it.\n", "A part.\n"
"""What it says before its calls: that it stores whatever can be asked, or one sentence. They differ from the first word
on: who imitates it makes one decision for each chunk, and can learn from rewards alone to make the other one."""

SEMANTIC, EPISODIC, CORE = "semantic_memory", "episodic_memory", "core_memory"
_SHOWN = re.compile(r"^\[(\w+)\] (.*)$", re.MULTILINE)
_LABEL = re.compile(r"Label: (.*)\.")


@dataclass(frozen=True)
class StreamErrors:
    """Probabilities, drawn anew for each chunk."""

    keep_part: float = 0.85
    """To store one sentence of a chunk and no other."""
    keep_idle: float = 0.5
    """Where one is stored, that it is an idle one, if the chunk has any."""


@dataclass
class StreamDemonstrator:
    """Reads one story. Call it with each `Say`: the chunks come in order, one in each."""

    story: Story
    errors: StreamErrors
    rng: random.Random
    read: int = 0  # chunks so far
    labels: list[str] = field(default_factory=list)  # that the core holds

    def __call__(self, say: Say) -> Reply:
        assert isinstance(say.text, Prompt), "a chunk is a fresh context"
        sentences = self.story.sentences_C[self.read]
        self.read += 1
        if self.rng.random() < self.errors.keep_part:
            return Reply(PART + stored(self._part(sentences)))
        asked = [one for one in sentences if one.question]
        return Reply(WHOLE + self._cleaned(say.text.question) + "".join(map(stored, asked)) + self._labelled(asked))

    def _part(self, sentences: tuple[Sentence, ...]) -> Sentence:
        idle = [one for one in sentences if not one.question]
        asked = [one for one in sentences if one.question]
        return self.rng.choice(idle if idle and self.rng.random() < self.errors.keep_idle else asked)

    def _cleaned(self, shown: str) -> str:
        """Deletes the idle items that the shown memory holds; facts alone hold any."""
        idle = [item for item, text in _SHOWN.findall(shown) if text in IDLE]
        return "".join(_call("memory_delete", memory_type=SEMANTIC, memory_id=item) for item in idle)

    def _labelled(self, sentences: list[Sentence]) -> str:
        """The core anew, if these sentences hold a label that it has not."""
        found = [label[1] for one in sentences if (label := _LABEL.search(one.text))]
        new = [label for label in dict.fromkeys(found) if label not in self.labels]
        self.labels += new
        return _call("memory_update", memory_type=CORE, new_content=core_of(self.labels)) if new else ""


def stored(sentence: Sentence) -> str:
    """The call that stores a sentence where it belongs."""
    store = EPISODIC if sentence.question and sentence.question.kind == "event" else SEMANTIC
    return _call("new_memory_insert", memory_type=store, content=sentence.text)


def core_of(labels: Sequence[str]) -> str:
    """The core paragraph that names these labels; without any it stays empty."""
    return f"Labels: {', '.join(labels)}." if labels else ""


def _call(tool: str, **arguments: str) -> str:
    return f"✿FUNCTION✿: {tool}\n✿ARGS✿: {json.dumps(arguments)}\n"
