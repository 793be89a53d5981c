"""Fakes that ship with the package, so that the whole loop runs in a test in seconds and without a file.

Nothing here imports JAX but through the types it returns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from memsearcher_jax.agent.play import play
from memsearcher_jax.agent.types import Find, Found, Passage, Problem, Reply, Say, Trajectory, Workflow
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.retrieval.search import Searcher
from memsearcher_jax.rl.demonstrate import Recorder
from memsearcher_jax.rl.rollout import Job
from memsearcher_jax.rl.searches import search_all
from memsearcher_jax.rl.tokens import TEXT_ENDS, TURN_ENDS, TURN_OPENS, ChatTokenizer
from memsearcher_jax.sampling.config import SamplingConfig

NANO = ModelConfig(
    vocab_size=264,
    embed_size=32,
    ffn_size=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_size=8,
    tied=True,
    max_positions=4_096,
    compute_dtype="float32",
)
"""A Qwen2.5 of about 20,000 parameters; every size divides a (2, 2, 2) mesh."""


NANO_SAMPLING = SamplingConfig(
    slots=3,
    context_tokens=128,
    decode_tokens=4,
    rows_per_call=2,
    prefill_piece=16,
    prefill_buckets=(32,),
    top_k=0,
    top_p=1.0,
)
"""A sampler for it: few slots, so that trajectories wait for one another."""


def byte_tokenizer() -> ChatTokenizer:
    """One token per UTF-8 byte, and the control tokens of ChatML: 259 ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: id for id, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in (TEXT_ENDS, TURN_OPENS, TURN_ENDS)]
    )
    return ChatTokenizer(tokenizer.to_str())


@dataclass
class ScriptedPolicy:
    """Says its replies in order; `heard` keeps every request. Running out of replies is an error of the test."""

    replies: Sequence[str | Reply]
    heard: list[Say] = field(default_factory=list)

    def __call__(self, say: Say) -> Reply:
        if len(self.heard) == len(self.replies):
            raise AssertionError(f"the workflow asked for more than the {len(self.replies)} scripted replies")
        reply = self.replies[len(self.heard)]
        self.heard.append(say)
        return reply if isinstance(reply, Reply) else Reply(reply)


class Script(Protocol):
    """Plays one problem; `data.demonstrator.Demonstrator` is one."""

    def __call__(self, say: Say) -> Reply:
        """What the policy says."""

    def read(self, find: Find, found: tuple[Found, ...]) -> tuple[Found, ...]:
        """Takes note of what a search found; returns what the workflow is to be told of it."""


@dataclass(frozen=True)
class ScriptedDriver:
    """In place of `rl.rollout.RolloutDriver`: replies come from scripts; workflow, searches and ids are real."""

    tokenizer: ChatTokenizer
    searcher: Searcher | None
    make_workflow: Callable[[Problem], Workflow]
    make_script: Callable[[Problem], Script]

    def run(self, jobs: Sequence[Job], params: Any, key: Any) -> Iterator[tuple[Job, Trajectory]]:
        """Yields trajectories one after the other; all log-probabilities are 0."""
        for job in jobs:
            script = self.make_script(job.problem)
            recorder = Recorder(self.tokenizer, script)

            def search(find: Find, script: Script = script) -> tuple[Found, ...]:
                return script.read(find, search_all(self.searcher, [find])[0])

            outcome = play(self.make_workflow(job.problem), recorder, search)
            recorder.close()
            transcript = self.tokenizer.transcript(recorder.contexts[-1].ids)
            yield job, Trajectory(job.problem, job.rollout, outcome, tuple(recorder.contexts), transcript)


@dataclass(frozen=True)
class TinyIndex:
    """Search by shared words over a handful of passages, with the interface of `retrieval.search.Searcher`."""

    passages: tuple[Passage, ...]

    def search(self, queries: Sequence[str], top_n: int) -> list[list[Passage]]:
        """Passages with the most words of the query first; ties keep their order."""
        return [self._ranked(query)[:top_n] for query in queries]

    def find(self, find: Find) -> tuple[Found, ...]:
        """The answer to a workflow's request."""
        return tuple(Found(tuple(self.search([query.text], query.top_n)[0])) for query in find.queries)

    def _ranked(self, query: str) -> list[Passage]:
        words = _words(query)
        return sorted(self.passages, key=lambda passage: -len(words & _words(passage.contents)))


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))
