"""Mem-alpha's memory as text: what a context shows of it while a chunk is read, and while a question is answered."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from memsearcher_jax.agent.memalpha_config import MemalphaConfig
from memsearcher_jax.agent.memalpha_memory import Item, Memory, Store, as_text
from memsearcher_jax.agent.memalpha_search import Index, index, rank
from memsearcher_jax.agent.types import Ruler, Stream

EMPTY = "Empty."
_SPACE = re.compile(r"\s+")
LISTS = (Store.SEMANTIC, Store.EPISODIC)


def shown_memory(memory: Memory, items: int, budget: int, ruler: Ruler) -> str:
    """The core in full and the latest `items` of each list, with their ids: what a chunk is read with.

    While it is over `budget` tokens the number of items is halved, as in the original; a core that is over it alone
    is cut, which a budget of more than `core_tokens` avoids.
    """
    text = _latest(memory, items)
    while items and ruler.count(text) > budget:
        items //= 2
        text = _latest(memory, items)
    return ruler.clip(text, budget)


def _latest(memory: Memory, items: int) -> str:
    parts = [f"core_memory:\n{as_text(memory.core) or EMPTY}"]
    for store in LISTS:
        held = memory.items(store)
        latest = held[len(held) - min(items, len(held)) :]
        note = f" (the latest {len(latest)} of {len(held)})" if len(latest) < len(held) else ""
        lines = "\n".join(f"[{item.id}] {item.text}" for item in latest)
        parts.append(f"{store.value}_memory{note}:\n{lines or EMPTY}")
    return "\n\n".join(parts)


@dataclass(frozen=True)
class Reader:
    """What the questions about one stream are answered from. Indices are built once, when first asked."""

    stream: Stream
    memory: Memory
    config: MemalphaConfig
    ruler: Ruler

    def about(self, query: str) -> str:
        """What is shown for one question, in at most `answer_memory_tokens`."""
        budget = self.config.answer_memory_tokens
        if self.config.reader == "long_context":
            return self._end_of_stream
        if self.config.reader == "rag":
            return self._fitting(self._chunks_about(query), _joined, budget)
        found = {store: self._items_about(store, query) for store in LISTS}
        most = max(map(len, found.values()))
        return self._fitting(range(most), lambda ranks: self._memory_text(found, len(ranks)), budget)

    def _fitting(self, ranked: Sequence, render: Callable[[Sequence], str], budget: int) -> str:
        """As many of `ranked`, best first, as fit; what none of them leaves is cut."""
        text = render(ranked)
        for count in reversed(range(len(ranked))):
            if self.ruler.count(text) <= budget:
                return text
            text = render(ranked[:count])
        return self.ruler.clip(text, budget)

    def _memory_text(self, found: dict[Store, Sequence[Item]], items: int) -> str:
        """The original's blocks: the core if there is one, then both lists, numbered by rank and without ids."""
        core = as_text(self.memory.core)
        parts = [f"core memory:\n{core}"] if core else []
        for store in LISTS:
            lines = "\n".join(f"{rank}. {item.text}" for rank, item in enumerate(found[store][:items], start=1))
            parts.append(f"{store.value} memory:\n{lines or EMPTY}")
        return "\n\n".join(parts)

    def _items_about(self, store: Store, query: str) -> list[Item]:
        items = self.memory.items(store)
        ranked = rank(self._index_of(store), query, top_k=self.config.retrieved_items)
        return [items[position] for position, _ in ranked]

    def _chunks_about(self, query: str) -> list[str]:
        ranked = rank(self._chunk_index, query, top_k=self.config.retrieved_chunks)
        return [self.stream.chunks[position] for position, _ in ranked]

    def _index_of(self, store: Store) -> Index:
        return self._semantic_index if store is Store.SEMANTIC else self._episodic_index

    @cached_property
    def _semantic_index(self) -> Index:
        return index([item.text for item in self.memory.semantic])

    @cached_property
    def _episodic_index(self) -> Index:
        return index([item.text for item in self.memory.episodic])

    @cached_property
    def _chunk_index(self) -> Index:
        return index(self.stream.chunks)

    @cached_property
    def _end_of_stream(self) -> str:
        """The last `answer_memory_tokens` of the stream, from a word's beginning on."""
        budget, tokens, first = self.config.answer_memory_tokens, 0, len(self.stream.chunks)
        while first and tokens <= budget:
            first -= 1
            tokens += self.ruler.count(self.stream.chunks[first])
        text = _joined(self.stream.chunks[first:])
        starts = [0, *(match.end() for match in _SPACE.finditer(text))]
        longest = bisect_left(starts, True, key=lambda start: self.ruler.count(text[start:]) <= budget)
        return text[starts[longest] :] if longest < len(starts) else ""


def _joined(chunks: Sequence[str]) -> str:
    return "\n\n".join(chunks)
