"""Mem-alpha's memory as text: what a context shows of it while a chunk is read, and while a question is answered."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from memsearcher_jax.agent.memalpha.config import MemalphaConfig
from memsearcher_jax.agent.memalpha.memory import ITEM_STORES, Item, Memory, Store
from memsearcher_jax.agent.memalpha.search import BM25Index
from memsearcher_jax.types import Stream, TokenCounter

EMPTY = "Empty."


def render_memory(memory: Memory, items: int, budget: int, token_counter: TokenCounter, *, tags: bool = False) -> str:
    """The complete core and the latest `items` of each list, with their ids: the memory as a chunk's context shows it.

    While the text is over `budget` tokens the number of items is halved, as in the original. A core that is over the
    budget by itself is cut; a budget above `core_tokens` prevents that.
    """
    text = _render_latest(memory, items, tags)
    while items and token_counter.count(text) > budget:
        items //= 2
        text = _render_latest(memory, items, tags)
    return token_counter.clip(text, budget)


def _render_latest(memory: Memory, count: int, tags: bool) -> str:
    blocks = [_block("core_memory", str(memory.core), "", tags)]
    for store in ITEM_STORES:
        items = memory.items(store)
        latest = items[max(0, len(items) - count) :]
        lines = "\n".join(f"[{item.id}] {item.text}" for item in latest) or EMPTY
        note = f" (the latest {len(latest)} of {len(items)})" if len(latest) < len(items) else ""
        if tags:
            note = f" (Only show the most recent {len(latest)} out of {len(items)} memories)"
        blocks.append(_block(f"{store.value}_memory", lines, note, tags))
    return "\n\n".join(blocks)


def _block(name: str, text: str, note: str, tags: bool) -> str:
    """A part of the memory; in `tags` as in the original's prompts."""
    return f"<{name}>{note}\n{text}\n</{name}>" if tags else f"{name}{note}:\n{text or EMPTY}"


@dataclass(frozen=True)
class EvidenceRetriever:
    """Retrieves the text from which one question about a stream is answered. Builds each index once, when needed."""

    stream: Stream
    memory: Memory
    config: MemalphaConfig
    token_counter: TokenCounter
    tags: bool = False

    def retrieve(self, query: str) -> str:
        """The text for one question, at most `answer_memory_tokens` long."""
        if self.config.answer_from == "long_context":
            return self._end_of_stream
        if self.config.answer_from == "rag":
            ranked = self._chunk_index.rank(query, top_k=self.config.retrieved_chunks)
            chunks = [self.stream.chunks[position] for position, _ in ranked]
            return self._fit(len(chunks), lambda count: "\n\n".join(chunks[:count]))
        retrieved = {}
        for store in ITEM_STORES:
            ranked = self._item_indices[store].rank(query, top_k=self.config.retrieved_items)
            retrieved[store] = [self.memory.items(store)[position] for position, _ in ranked]
        return self._fit(max(map(len, retrieved.values())), lambda count: self._render(retrieved, count))

    @cached_property
    def _item_indices(self) -> dict[Store, BM25Index]:
        return {store: BM25Index.build([item.text for item in self.memory.items(store)]) for store in ITEM_STORES}

    @cached_property
    def _chunk_index(self) -> BM25Index:
        return BM25Index.build(self.stream.chunks)

    def _fit(self, count: int, render: Callable[[int], str]) -> str:
        """`render` of the largest number up to `count` whose text fits the budget; cut if even `render(0)` does not."""
        budget = self.config.answer_memory_tokens
        text = render(count)
        while count and self.token_counter.count(text) > budget:
            count -= 1
            text = render(count)
        return self.token_counter.clip(text, budget)

    def _render(self, retrieved: Mapping[Store, Sequence[Item]], count: int) -> str:
        """The original's blocks: the core unless it is empty, then both lists, numbered by rank and without ids."""
        core = str(self.memory.core)
        heading = "{}_memory" if self.tags else "{} memory"
        blocks = [_block(heading.format("core"), core, "", self.tags)] if core.strip() else []
        for store in ITEM_STORES:
            lines = "\n".join(f"{rank}. {item.text}" for rank, item in enumerate(retrieved[store][:count], start=1))
            lines = lines or ("(No memories stored)" if self.tags else EMPTY)
            blocks.append(_block(heading.format(store.value), lines, "", self.tags))
        return "\n\n".join(blocks)

    @cached_property
    def _end_of_stream(self) -> str:
        """The last `answer_memory_tokens` of the stream, starting at the beginning of a word."""
        budget = self.config.answer_memory_tokens
        first = len(self.stream.chunks)
        tokens = 0
        while first and tokens <= budget:
            first -= 1
            tokens += self.token_counter.count(self.stream.chunks[first])
        text = "\n\n".join(self.stream.chunks[first:])
        starts = [0, *(match.end() for match in re.finditer(r"\s+", text))]
        longest = bisect_left(starts, True, key=lambda start: self.token_counter.count(text[start:]) <= budget)
        return text[starts[longest] :] if longest < len(starts) else ""
