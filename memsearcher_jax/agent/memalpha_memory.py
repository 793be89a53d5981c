"""Mem-alpha's memory as a value: one core paragraph, and semantic and episodic items (arXiv 2509.25911, section 3).

Every operation returns a new memory and a `Result`; the old memory stays as it was. Ids come from a counter that goes
with the memory, so they never collide, and the id of a deleted item is never given out again.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memsearcher_jax.agent.memalpha_items import Items
from memsearcher_jax.agent.types import Ruler

Json = Any
"""What `json.loads` returns. A policy may store a number or a list; it is kept as it came and read as `as_text`."""


class Store(enum.Enum):
    CORE = "core"
    SEMANTIC = "semantic"
    EPISODIC = "episodic"


class Status(enum.Enum):
    OK = "ok"
    SKIPPED = "skipped"  # the store holds exactly this content already
    ERROR = "error"


class ErrorKind(enum.Enum):
    """The original's four groups of errors; `Fault.message` says what it was."""

    UNREADABLE = "Invalid JSON arguments"
    MISSING = "Missing required argument"  # or a tool that is not offered
    INVALID = "Invalid argument value"  # an id that the store does not hold, or a store that is switched off
    UNEXPECTED = "Unexpected error"  # arguments that are no object, or a memory_type that the tool does not take


@dataclass(frozen=True)
class Fault:
    """Why a call was not executed, in one line."""

    kind: ErrorKind
    message: str


@dataclass(frozen=True)
class Item:
    id: str
    content: Json
    tokens: int  # of `text`, measured once, when it was written

    @property
    def text(self) -> str:
        return as_text(self.content)


@dataclass(frozen=True)
class Result:
    """What became of one operation."""

    status: Status
    fault: Fault | None = None  # set where the status is ERROR, and only there
    item: Item | None = None  # what was inserted or updated; None for the core
    idle: bool = False  # a delete that found nothing to delete
    tokens_cut: int = 0  # by how many tokens a core paragraph was over its budget
    hits: tuple[tuple[Item, float], ...] = ()  # of a search: items with their scores, best first


@dataclass(frozen=True)
class Memory:
    """What is remembered, and the next id. Stores that are not in `enabled` refuse every operation and stay empty."""

    core: Json = ""
    core_tokens: int = 0
    semantic: Items = field(default_factory=Items)
    episodic: Items = field(default_factory=Items)
    next_id: int = 0
    core_budget: int = 512  # tokens
    enabled: frozenset[Store] = frozenset(Store)

    def __post_init__(self) -> None:
        for name in ("semantic", "episodic"):
            if not isinstance(held := getattr(self, name), Items):
                object.__setattr__(self, name, Items(held))

    @property
    def tokens(self) -> int:
        """Tokens of the core and of all items; ids do not count."""
        return self.core_tokens + sum(item.tokens for item in (*self.semantic, *self.episodic))

    def items(self, store: Store) -> Items:
        """The items of a store, oldest first. Raises ValueError for the core, which is a paragraph."""
        if store is Store.CORE:
            raise ValueError("the core memory has no items: read Memory.core")
        return self.semantic if store is Store.SEMANTIC else self.episodic

    def insert(self, store: Store, content: Json, ruler: Ruler) -> tuple[Memory, Result]:
        """Appends an item under a new id; exactly the same content once more is skipped."""
        if store is Store.CORE:
            return self, _error(ErrorKind.INVALID, "core memory cannot be inserted, only updated")
        if refused := self._refused(store):
            return self, refused
        if self.items(store).holds(content):
            return self, Result(Status.SKIPPED)
        item = Item(f"{self.next_id:04x}", content, ruler.count(as_text(content)))
        grown = self._with_items(store, self.items(store).added(item))
        return replace(grown, next_id=self.next_id + 1), Result(Status.OK, item=item)

    def update(self, store: Store, content: Json, item_id: Json, ruler: Ruler) -> tuple[Memory, Result]:
        """Replaces the content of an item in its place, or the whole core, for which `item_id` is ignored."""
        if refused := self._refused(store):
            return self, refused
        if store is Store.CORE:
            kept, excess = _within(content, self.core_budget, ruler)
            return replace(self, core=kept, core_tokens=ruler.count(as_text(kept))), Result(
                Status.OK, tokens_cut=excess
            )
        items = self.items(store)
        position = _position(items, item_id)
        if position is None:
            return self, _error(ErrorKind.INVALID, f"{store.value} memory holds no item with the id {item_id!r}")
        item = Item(items[position].id, content, ruler.count(as_text(content)))
        return self._with_items(store, items.replaced(position, item)), Result(Status.OK, item=item)

    def delete(self, store: Store, item_id: Json = None) -> tuple[Memory, Result]:
        """Removes an item, or empties the core. Nothing to remove is no error, as in the original, but `idle`."""
        if refused := self._refused(store):
            return self, refused
        if store is Store.CORE:
            return replace(self, core="", core_tokens=0), Result(Status.OK, idle=self.core == "")
        items = self.items(store)
        position = _position(items, item_id)
        if position is None:
            return self, Result(Status.OK, idle=True)
        return self._with_items(store, items.without(position)), Result(Status.OK)

    def _refused(self, store: Store) -> Result | None:
        if store in self.enabled:
            return None
        return _error(ErrorKind.INVALID, f"{store.value} memory is switched off")

    def _with_items(self, store: Store, items: Items) -> Memory:
        return replace(self, **{store.value: items})


def as_text(content: Json) -> str:
    """How content reads: text as it is, a list as its parts with spaces between, anything else as Python prints it."""
    if isinstance(content, str):
        return content
    return " ".join(map(str, content)) if isinstance(content, list) else str(content)


def _error(kind: ErrorKind, message: str) -> Result:
    return Result(Status.ERROR, Fault(kind, message))


def _position(items: Sequence[Item], item_id: Json) -> int | None:
    return next((position for position, item in enumerate(items) if item.id == item_id), None)


def _within(content: Json, budget: int, ruler: Ruler) -> tuple[Json, int]:
    """`content` cut at `budget` tokens, and by how many it was over.

    The original's cut: whole words go from the end, white space collapses, and a notice takes the place of the rest.
    Text without spaces is one word, of which nothing is left.
    """
    if content is None:
        return "", 0  # `null` is no paragraph; the original could never update the core again
    text = as_text(content)
    excess = ruler.count(text) - budget
    if excess <= 0:
        return content, 0
    notice = f" [content exceeds {budget} tokens, truncated]"
    words, room = text.split(), budget - ruler.count(notice)
    kept = bisect_right(range(1, len(words)), room, key=lambda count: ruler.count(" ".join(words[:count])))
    return " ".join(words[:kept]) + notice, excess
