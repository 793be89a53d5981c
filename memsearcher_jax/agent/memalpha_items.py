"""The items of a store as a value that grows cheaply: a longer one shares what it holds with the one it grew from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memsearcher_jax.agent.memalpha_memory import Item


class Items(Sequence):
    """Items, oldest first. Never changes, and equals a tuple of the same items.

    To add one, and to ask whether a content is held, takes the same time however many there are: a stream of a million
    tokens leaves tens of thousands. To replace or remove one takes as long as to copy all. For one thread.
    """

    __slots__ = ("_grown", "_length")

    def __init__(self, items: Iterable[Item] = ()):
        self._grown = _Grown()
        for item in items:
            self._grown.add(item)
        self._length = len(self._grown.items)

    def added(self, item: Item) -> Items:
        """With one more at the end."""
        # Whoever else grew from this value has put another item behind it: then the two part.
        longer = Items(self) if self._length < len(self._grown.items) else self._view(self._length)
        longer._grown.add(item)
        longer._length += 1
        return longer

    def replaced(self, position: int, item: Item) -> Items:
        """With another item in that place."""
        return Items((*self[:position], item, *self[position + 1 :]))

    def without(self, position: int) -> Items:
        """With that item left out."""
        return Items((*self[:position], *self[position + 1 :]))

    def holds(self, content: Any) -> bool:
        """Whether an item has exactly this content."""
        return self._grown.place(content) < self._length

    def _view(self, length: int) -> Items:
        view = object.__new__(Items)
        view._grown, view._length = self._grown, length
        return view

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Item]:
        return islice(self._grown.items, self._length)

    def __getitem__(self, key: int | slice) -> Any:
        """One item, or a tuple of several."""
        places = range(self._length)[key]
        return (
            self._grown.items[places] if isinstance(places, int) else tuple(map(self._grown.items.__getitem__, places))
        )

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Items | tuple) else NotImplemented

    __hash__ = None

    def __repr__(self) -> str:
        return repr(tuple(self))


class _Grown:
    """All items that any of the values which share it holds; each holds so many of the first ones."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._places: dict[Any, int] = {}  # content -> the first place that has it
        self._unhashable: list[tuple[Any, int]] = []  # likewise, lists and objects of JSON

    def add(self, item: Item) -> None:
        place = len(self.items)
        self.items.append(item)
        try:
            self._places.setdefault(item.content, place)
        except TypeError:
            self._unhashable.append((item.content, place))

    def place(self, content: Any) -> float:
        """The first place that has this content; infinite if none has."""
        try:
            return self._places.get(content, float("inf"))
        except TypeError:
            return next((place for held, place in self._unhashable if held == content), float("inf"))
