"""A model, a tokenizer, a policy and a search for tests: the whole loop runs in seconds and without a file."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.tokenizer import END_OF_TEXT, IM_END, IM_START, ChatTokenizer
from memsearcher_jax.types import Completion, Generate, Passage, Prompt, Search, SearchResult, TextSpan

SMALL_RUN = """
    --config nano --model.layers 1 --model.embed_size 32 --model.ffn_size 64 --agent.completion_tokens 8
    --agent.max_turns 2 --sampling.slots 8 --rl.prompts_per_step 4 --rl.group_size 2 --rl.checkpoint_every 1
    --rl.steps 2 --evaluation.max_questions 4
"""
"""Flags of a run that takes seconds. Tests that use no others share its compiled programs."""


def with_flags(words: Sequence[str], *changes: str) -> list[str]:
    """The words of a command, in which the flags among `changes` replace those of the same name."""
    changed = {word.partition("=")[0] for word in changes if word.startswith("--")}
    kept: list[str] = []
    is_replaced = False
    for word in words:
        if word.startswith("--"):
            is_replaced = word.partition("=")[0] in changed
        if not is_replaced:
            kept.append(word)
    return [*kept, *changes]


NANO = ModelConfig(
    vocab_size=264,
    embed_size=32,
    ffn_size=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_size=8,
    tie_embeddings=True,
    max_positions=4_096,
    compute_dtype="float32",
)
"""A Qwen2.5 of about 20,000 parameters; every size divides a (2, 2, 2) mesh."""


@contextlib.contextmanager
def one_device() -> Iterator[None]:
    """Commands inside it use one device: on eight, each would compute its own slots for every question."""
    import jax

    first = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("devices", "local_devices"):
            patch.setattr(jax, name, lambda: first)
        yield


NANO_SAMPLING = SamplingConfig(
    slots=3, context_tokens=128, decode_steps_per_call=4, prefill_chunk=16, prefill_buckets=(32,), top_k=0, top_p=1.0
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
        [AddedToken(text, special=True, normalized=False) for text in (END_OF_TEXT, IM_START, IM_END)]
    )
    return ChatTokenizer(tokenizer.to_str())


def make_prompt(prefix: str, question: str, bridge: str, memory: str, suffix: str) -> Prompt:
    """A prompt with the segments of a search agent: texts of ours and from outside in turns."""
    spans = (prefix, True), (question, False, "question"), (bridge, True), (memory, False, "memory"), (suffix, True)
    return Prompt(tuple(TextSpan(*span) for span in spans))


def chat_completion(text: str, finish_reason: str = "stop") -> tuple[int, dict[str, Any]]:
    """A reply of the fixture `serving`."""
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}]}


@dataclass
class ScriptedPolicy:
    """Returns its completions in order and keeps every request. Running out of them is an error of the test."""

    completions: Sequence[str | Completion]
    requests: list[Generate] = field(default_factory=list)

    def __call__(self, request: Generate) -> Completion:
        if len(self.requests) == len(self.completions):
            raise AssertionError(f"the workflow asked for more than the {len(self.completions)} scripted completions")
        completion = self.completions[len(self.requests)]
        self.requests.append(request)
        return completion if isinstance(completion, Completion) else Completion(completion)


@dataclass(frozen=True)
class TinyIndex:
    """Search by shared words over a handful of passages, with the interface of `retrieval.search.Searcher`."""

    passages: tuple[Passage, ...]

    def search(self, queries: Sequence[str], top_n: int) -> list[list[Passage]]:
        """Passages with the most words of the query first; ties keep their order."""

        def rank(query: str) -> list[Passage]:
            words = _words(query)
            return sorted(self.passages, key=lambda passage: -len(words & _words(passage.contents)))

        return [rank(query)[:top_n] for query in queries]

    def answer(self, request: Search) -> tuple[SearchResult, ...]:
        """The results of a workflow's request."""
        return tuple(SearchResult(tuple(self.search([query.text], query.top_n)[0])) for query in request.queries)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))
