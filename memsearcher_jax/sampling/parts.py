"""Which devices hold which slots, and the arrays by which a call to the device names some of them.

A mesh with several copies of the weights holds the slots in as many parts. A call works on a few rows of each part,
so that no device ever needs what another one caches; it names a slot by its number within the part, and writes the
part's size where a row has nothing to do (see `model/cache.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Parts:
    """`count` parts of `size` slots each."""

    count: int
    size: int

    def around(self, slot: int) -> range:
        """The slots of the same part."""
        first = slot - slot % self.size
        return range(first, first + self.size)

    def nobody(self, rows: int) -> np.ndarray:
        """row_A of a call with so many rows for each part, none of which has anything to do."""
        return np.full(self.count * rows, self.size, np.int32)

    def seats(self, slots: Iterable[int], rows: int) -> dict[int, int]:
        """The index in row_A of as many of these slots as there are rows for; those that come first go first."""
        seats: dict[int, int] = {}
        taken = [0] * self.count
        for slot in slots:
            part = slot // self.size
            if taken[part] < rows:
                seats[slot] = part * rows + taken[part]
                taken[part] += 1
        return seats

    def fewest(self, slots: Sequence[int], choices: Sequence[int]) -> tuple[dict[int, int], np.ndarray | None]:
        """The index of each of these slots in a call, and its row_A: the first choice of rows that has room for all.

        None where no choice has: the call is for all slots there are, each at its own number.
        """
        busiest = max(Counter(slot // self.size for slot in slots).values(), default=0)
        rows = next((rows for rows in choices if rows >= busiest), None)
        if rows is None:
            return {slot: slot for slot in slots}, None
        seats = self.seats(slots, rows)
        return seats, self.named({seat: slot for slot, seat in seats.items()}, rows)

    def named(self, slot_of: dict[int, int], rows: int) -> np.ndarray:
        """row_A with the slot that each index is for, given by index."""
        row_A = self.nobody(rows)
        for index, slot in slot_of.items():
            row_A[index] = slot % self.size
        return row_A

    def values(self, value_of: dict[int, int], rows: int) -> np.ndarray:
        """An int32 for each row, given by index; 0 elsewhere."""
        value_A = np.zeros(self.count * rows, np.int32)
        for index, value in value_of.items():
            value_A[index] = value
        return value_A
