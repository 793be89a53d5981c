"""One block of prefill: pieces of several contexts side by side, so that short and long texts fill the same program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memsearcher_jax.sampling.parts import Parts


@dataclass(frozen=True)
class Piece:
    """Tokens that follow each other in one context."""

    slot: int
    start: int  # position of the first
    count: int


def seat_pieces(behind: Mapping[int, tuple[int, int]], parts: Parts, seats: int, width: int) -> list[Piece | None]:
    """Who has which seat of a block with `seats` seats for each part of the mesh, each `width` tokens wide.

    `behind` names the slots, who comes first is served first, and of each the position from which tokens are missing
    and how many. A context's pieces are full but for its last, and stand next to each other; a context that finds too
    few seats takes those that are left.
    """
    block: list[list[Piece | None]] = [[] for _ in range(parts.count)]
    for slot, (start, missing) in behind.items():
        row = block[slot // parts.size]
        for done in range(0, missing, width):
            if len(row) < seats:
                row.append(Piece(slot, start + done, min(width, missing - done)))
    return [piece for row in block for piece in (*row, *[None] * (seats - len(row)))]


@dataclass(frozen=True)
class Block:
    """The arrays of one prefill call: a row of T tokens for each part of the mesh, cut into A seats in all."""

    ids_BT: np.ndarray  # int32
    position_BT: np.ndarray  # int32
    segment_BT: np.ndarray  # int32: one number for each context; 0 is padding
    row_A: np.ndarray  # int32: slots, as `model.cache` names rows
    start_A: np.ndarray  # int32: position of the seat's first token
    follows_A: np.ndarray  # bool: whether the context begins with the shared prefix
    tokens: dict[int, int]  # of each slot that takes part

    @classmethod
    def of(
        cls, pieces: Sequence[Piece | None], parts: Parts, width: int, ids_SC: np.ndarray, follows_S: np.ndarray
    ) -> Block:
        """The block whose seats are taken by `pieces`; the ids stand in `ids_SC`."""
        count = len(pieces)
        ids_AW, segment_AW = np.zeros((count, width), np.int32), np.zeros((count, width), np.int32)
        start_A, follows_A, row_A = np.zeros(count, np.int32), np.zeros(count, bool), parts.nobody(count // parts.count)
        tokens: dict[int, int] = {}
        for seat, piece in enumerate(pieces):
            if piece is not None:
                tokens[piece.slot] = tokens.get(piece.slot, 0) + piece.count
                ids_AW[seat, : piece.count] = ids_SC[piece.slot, piece.start : piece.start + piece.count]
                segment_AW[seat, : piece.count] = piece.slot + 1
                row_A[seat], start_A[seat] = piece.slot % parts.size, piece.start
                follows_A[seat] = follows_S[piece.slot]
        position_AW = start_A[:, None] + np.arange(width, dtype=np.int32)
        ids_BT, position_BT, segment_BT = (x_AW.reshape(parts.count, -1) for x_AW in (ids_AW, position_AW, segment_AW))
        return cls(ids_BT, position_BT, segment_BT, row_A, start_A, follows_A, tokens)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """In the order in which `sampler.prefill` takes them."""
        return self.ids_BT, self.position_BT, self.segment_BT, self.row_A, self.start_A, self.follows_A
