"""The host's record of one replica's KV cache: which pages are free, who holds the others, and what they contain.

Pages form a tree: a page is the child of the page before it. A page that nobody holds any more keeps its content until
it is allocated again, the longest free first. So a new context finds its longest cached beginning by walking the tree:
that of its own previous turn, of other rollouts of the same problem, of any context with the same system prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ROOT = -1
UNUSED = -2
BLOCK = 32
"""Tokens. Pages are found by their beginnings of so many tokens and multiples of it, not compared one by one."""


@dataclass(frozen=True)
class CachedPrefix:
    """The longest beginning of a text that is cached: full pages, then the first tokens of one more."""

    pages: list[int]
    tail: int = 0  # a page
    tail_tokens: int = 0  # at its beginning; 0: none
    is_growing: bool = False  # a prefill that is not finished will make it longer


class PagePool:
    """P pages of E tokens. A page is held by the contexts that it is part of; a page that nobody holds is free."""

    def __init__(self, pages: int, page_tokens: int):
        self.page_tokens = page_tokens
        self._ids_PE = np.zeros((pages, page_tokens), np.int32)
        self._planned_P = np.zeros(pages, np.int32)  # leading tokens in ids_PE
        self._cached_P = np.zeros(pages, np.int32)  # leading tokens whose keys and values are cached
        self._content_P = np.zeros(pages, np.int64)  # number of the page's present content, never used twice
        self._parent_P = np.zeros(pages, np.int64)  # content of the page before it
        self._holders_P = np.zeros(pages, np.int32)
        self._contents = 0
        self._children: dict[int, set[int]] = {}  # pages by the content of the page before them
        # Pages by the content of the page before them and their first tokens, in whole blocks.
        self._by_beginning: dict[tuple[int, bytes], set[int]] = {}
        self._free: dict[int, None] = {}  # in the order in which they are allocated
        self.clear()

    @property
    def free(self) -> int:
        """Pages that can be allocated."""
        return len(self._free)

    def clear(self) -> None:
        """Frees all pages and forgets what they contain."""
        self._parent_P[:] = UNUSED
        self._planned_P[:] = 0
        self._cached_P[:] = 0
        self._holders_P[:] = 0
        self._content_P[:] = UNUSED
        self._children.clear()
        self._by_beginning.clear()
        self._free = dict.fromkeys(range(len(self._holders_P)))

    def pages_for(self, tokens: int) -> int:
        """Pages of a context of this many tokens."""
        return -(-tokens // self.page_tokens)

    def find(self, ids_T: np.ndarray) -> CachedPrefix:
        """The longest cached beginning of `ids_T`."""
        pages: list[int] = []
        parent = ROOT
        E = self.page_tokens
        for start in range(0, len(ids_T), E):
            wanted_E = ids_T[start : start + E]
            children = self._children.get(parent)
            if not children:
                break
            child_X = np.fromiter(self._most_alike(parent, children, wanted_E), np.int64)
            differs_XE = self._ids_PE[child_X, : len(wanted_E)] != wanted_E
            common_X = np.where(differs_XE.any(axis=1), differs_XE.argmax(axis=1), len(wanted_E))
            planned_X = np.minimum(common_X, self._planned_P[child_X])
            cached_X = np.minimum(common_X, self._cached_P[child_X])
            best = np.lexsort((child_X, cached_X, planned_X))[-1]
            page = int(child_X[best])
            cached = int(cached_X[best])
            if cached < E:
                return CachedPrefix(pages, page, cached, is_growing=bool(cached < planned_X[best]))
            pages.append(page)
            parent = int(self._content_P[page])
        return CachedPrefix(pages)

    def _most_alike(self, parent: int, children: set[int], wanted_E: np.ndarray) -> set[int]:
        """The children of a page that begin with as many blocks of `wanted_E` as any of them."""
        found = children
        for end in range(BLOCK, len(wanted_E) + 1, BLOCK):
            longer = self._by_beginning.get((parent, wanted_E[:end].tobytes()))
            if not longer:
                break
            found = longer
        return found

    def _index(self, page: int, indexed: int) -> None:
        """Adds the beginnings of a page that end after its first `indexed` tokens."""
        parent = int(self._parent_P[page])
        for end in range(indexed - indexed % BLOCK + BLOCK, int(self._planned_P[page]) + 1, BLOCK):
            key = (parent, self._ids_PE[page, :end].tobytes())
            self._by_beginning.setdefault(key, set()).add(page)

    def _unindex(self, page: int, kept: int) -> None:
        """Removes the beginnings of a page that end after its first `kept` tokens."""
        parent = int(self._parent_P[page])
        for end in range(kept - kept % BLOCK + BLOCK, int(self._planned_P[page]) + 1, BLOCK):
            key = (parent, self._ids_PE[page, :end].tobytes())
            pages = self._by_beginning[key]
            pages.remove(page)
            if not pages:
                del self._by_beginning[key]

    def _set_planned(self, page: int, tokens: int) -> None:
        """Sets how many tokens of a page are planned; more of them were written before."""
        before = int(self._planned_P[page])
        if tokens < before:
            self._unindex(page, tokens)
        self._planned_P[page] = tokens
        if tokens > before:
            self._index(page, before)

    def hold(self, pages: Sequence[int]) -> None:
        """Adds a holder to each page."""
        for page in pages:
            self._holders_P[page] += 1
            self._free.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Removes a holder from each page; the last pages of a context are allocated again first."""
        for page in reversed(pages):
            self._holders_P[page] -= 1
            if not self._holders_P[page]:
                self._set_planned(page, int(self._cached_P[page]))
                self._free[page] = None

    def extend(self, pages: list[int], count: int) -> None:
        """Appends `count` free pages to a context's pages."""
        for _ in range(count):
            page = next(iter(self._free))
            self.truncate(page, 0)
            self._children.get(int(self._parent_P[page]), set()).discard(page)
            parent = int(self._content_P[pages[-1]]) if pages else ROOT
            self._parent_P[page] = parent
            self._children.setdefault(parent, set()).add(page)
            self.hold([page])
            pages.append(page)

    def is_shared(self, page: int) -> bool:
        """Whether several contexts hold the page."""
        return bool(self._holders_P[page] > 1)

    def truncate(self, page: int, tokens: int) -> None:
        """Forgets all but the first `tokens` tokens of a page, and with them the pages after it."""
        self._set_planned(page, tokens)
        self._cached_P[page] = tokens
        self._children.pop(int(self._content_P[page]), None)
        self._contents += 1
        self._content_P[page] = self._contents

    def copy_content(self, source: int, target: int, tokens: int) -> None:
        """Records that the target's first `tokens` tokens are those of the source, which may be the same page."""
        self._set_planned(target, 0)
        self._ids_PE[target, :tokens] = self._ids_PE[source, :tokens]
        self._set_planned(target, tokens)
        self._cached_P[target] = tokens

    def plan(self, pages: Sequence[int], start: int, ids_T: np.ndarray) -> None:
        """Records tokens that a context will have from `start` on."""
        E = self.page_tokens
        end = start + len(ids_T)
        for number in range(start // E, self.pages_for(end)):
            page = pages[number]
            offset = number * E - start  # of the page's first token in ids_T
            first = max(0, -offset)
            last = min(E, end - number * E)
            self._set_planned(page, first)
            self._ids_PE[page, first:last] = ids_T[offset + first : offset + last]
            self._set_planned(page, last)

    def mark_cached(self, pages: Sequence[int], start: int, end: int) -> None:
        """Records that the planned tokens from `start` to `end` are cached."""
        E = self.page_tokens
        for number in range(start // E, self.pages_for(end)):
            self._cached_P[pages[number]] = min(E, end - number * E)
