"""Mem-alpha's memory as a value: one core paragraph, and semantic and episodic items (arXiv 2509.25911, section 3).

Every operation returns a new memory and a `CallResult`; the old memory does not change. Ids come from a counter in the
memory, so two items never share an id, and the id of a deleted item is never reused. The collections are persistent
(pyrsistent): a new memory shares with the old one what has not changed, so an insert costs the same in any store.
"""

from __future__ import annotations

import enum
import json
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from typing import Any

from pyrsistent import PBag, PVector, pbag, pvector

from memsearcher_jax.types import TokenCounter

Json = Any
"""What `json.loads` returns. A policy may write a number or a list: it is kept, and shown as Python prints it."""


class Store(enum.Enum):
    CORE = "core"
    SEMANTIC = "semantic"
    EPISODIC = "episodic"


ITEM_STORES = (Store.SEMANTIC, Store.EPISODIC)


class Status(enum.Enum):
    OK = "ok"
    SKIPPED = "skipped"  # the store already holds exactly this content
    ERROR = "error"


class ErrorKind(enum.Enum):
    """The four error groups of the original implementation."""

    UNREADABLE = "Invalid JSON arguments"
    MISSING = "Missing required argument"  # or an unknown tool
    INVALID = "Invalid argument value"  # an id that the store does not hold, or a disabled store
    UNEXPECTED = "Unexpected error"  # arguments that are no object, a memory_type or an id of a kind that does not fit


@dataclass(frozen=True)
class Item:
    id: str
    content: Json
    tokens: int  # of `as_text(content)`

    @property
    def text(self) -> str:
        return str(self.content)


@dataclass(frozen=True)
class CallResult:
    """The result of one operation."""

    status: Status
    error: ErrorKind | None = None  # why it was not executed: set exactly where the status is ERROR
    message: str = ""  # of the error, one line
    item: Item | None = None  # the inserted or updated item; None for the core
    idle: bool = False  # a delete that found nothing to delete
    tokens_cut: int = 0  # tokens by which a core paragraph was over its budget
    hits: tuple[tuple[Item, float], ...] = ()  # of a search: items with their scores, best first

    @classmethod
    def failed(cls, kind: ErrorKind, message: str) -> CallResult:
        return cls(Status.ERROR, kind, message)


@dataclass(frozen=True)
class Memory:
    """The three stores and the next id. No call reaches a store that is not in `enabled`, so it stays empty."""

    core: Json = ""
    core_tokens: int = 0
    semantic: PVector[Item] = field(default_factory=pvector)  # oldest first, and so ordered by id
    episodic: PVector[Item] = field(default_factory=pvector)
    contents: PBag[tuple[Store, Json]] = field(default_factory=lambda: pbag(()))  # those of all items
    next_id: int = 0
    core_budget: int = 512  # tokens
    enabled: frozenset[Store] = frozenset(Store)

    @property
    def tokens(self) -> int:
        """Tokens of the core and of all items; ids do not count."""
        return self.core_tokens + sum(item.tokens for item in (*self.semantic, *self.episodic))

    def items(self, store: Store) -> PVector[Item]:
        """The items of a store, oldest first. Raises ValueError for the core, which is a paragraph."""
        if store is Store.CORE:
            raise ValueError("the core memory has no items: read Memory.core")
        return self.semantic if store is Store.SEMANTIC else self.episodic

    def insert(self, store: Store, content: Json, token_counter: TokenCounter) -> tuple[Memory, CallResult]:
        """Appends an item under a new id. Content that the store already holds is skipped."""
        if store is Store.CORE:
            return self, CallResult.failed(ErrorKind.INVALID, "core memory cannot be inserted, only updated")
        if (store, _content_key(content)) in self.contents:
            return self, CallResult(Status.SKIPPED)
        item = Item(f"{self.next_id:04x}", content, token_counter.count(as_text(content)))
        memory = self._with_items(store, self.items(store).append(item), added=item)
        return replace(memory, next_id=self.next_id + 1), CallResult(Status.OK, item=item)

    def update(
        self, store: Store, content: Json, item_id: Json, token_counter: TokenCounter
    ) -> tuple[Memory, CallResult]:
        """Replaces the content of one item, or the complete core, for which `item_id` is ignored."""
        if store is Store.CORE:
            content, tokens_cut = _fit_core(content, self.core_budget, token_counter)
            memory = replace(self, core=content, core_tokens=token_counter.count(as_text(content)))
            return memory, CallResult(Status.OK, tokens_cut=tokens_cut)
        items = self.items(store)
        position = _position(items, item_id)
        if position is None:
            message = f"{store.value} memory holds no item with the id {item_id!r}"
            return self, CallResult.failed(ErrorKind.INVALID, message)
        item = Item(items[position].id, content, token_counter.count(as_text(content)))
        memory = self._with_items(store, items.set(position, item), removed=items[position], added=item)
        return memory, CallResult(Status.OK, item=item)

    def delete(self, store: Store, item_id: Json = None) -> tuple[Memory, CallResult]:
        """Removes an item, or empties the core. As in the original, removing nothing is `idle` and not an error."""
        if store is Store.CORE:
            return replace(self, core="", core_tokens=0), CallResult(Status.OK, idle=self.core == "")
        items = self.items(store)
        position = _position(items, item_id)
        if position is None:
            return self, CallResult(Status.OK, idle=True)
        return self._with_items(store, items.delete(position), removed=items[position]), CallResult(Status.OK)

    def _with_items(
        self, store: Store, items: PVector[Item], removed: Item | None = None, added: Item | None = None
    ) -> Memory:
        contents = self.contents
        if removed:
            contents = contents.remove((store, _content_key(removed.content)))
        if added:
            contents = contents.add((store, _content_key(added.content)))
        return replace(self, contents=contents, **{store.value: items})


def as_text(content: Json) -> str:
    """Content as its tokens are counted: the parts of a list joined by spaces, anything else as Python prints it."""
    if isinstance(content, str):
        return content
    return " ".join(map(str, content)) if isinstance(content, list) else str(content)


def _content_key(content: Json) -> Json:
    """Equal for equal contents; lists and objects, which cannot be hashed, are compared as JSON."""
    return (json.dumps(content, sort_keys=True),) if isinstance(content, (list, dict)) else content


def _position(items: PVector[Item], item_id: Json) -> int | None:
    if not isinstance(item_id, str):
        return None
    position = bisect_left(items, (len(item_id), item_id), key=lambda item: (len(item.id), item.id))
    return position if position < len(items) and items[position].id == item_id else None


def _fit_core(content: Json, budget: int, token_counter: TokenCounter) -> tuple[Json, int]:
    """`content` cut at `budget` tokens, and the number of tokens by which it was over the budget.

    Cuts as the original does: drops words at the end, collapses white space and appends a notice. Text without spaces
    is one word, so nothing of it remains.
    """
    if content is None:
        return "", 0  # the original stores `null`, after which it can never update the core again
    text = as_text(content)
    excess = token_counter.count(text) - budget
    if excess <= 0:
        return content, 0
    notice = f" [content exceeds {budget} tokens, truncated]"
    words = text.split()
    room = budget - token_counter.count(notice)
    kept = bisect_right(range(1, len(words)), room, key=lambda count: token_counter.count(" ".join(words[:count])))
    return token_counter.clip(" ".join(words[:kept]) + notice, budget), excess
