"""The results of the queries that were asked last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key, Value = TypeVar("Key", bound=Hashable), TypeVar("Value")


class RecentlyUsed(Generic[Key, Value]):
    """A mapping of at most `limit` entries that forgets the least recently used one. Threads may share it."""

    def __init__(self, limit: int):
        self._limit = limit
        self._entries: OrderedDict[Key, Value] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key]

    def put(self, key: Key, value: Value) -> None:
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            if len(self._entries) > self._limit:
                self._entries.popitem(last=False)
