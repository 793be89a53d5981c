"""How texts of many lengths fill one block of prefill."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memsearcher_jax.sampling.parts import Parts
from memsearcher_jax.sampling.pieces import Block, Piece, seat_pieces

missing = st.dictionaries(st.integers(0, 5), st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=6)


@settings(deadline=None)
@given(missing, st.integers(1, 6), st.integers(1, 7))
def test_contexts_are_served_in_order_and_in_whole_pieces(behind, seats, width):
    parts = Parts(2, 3)
    block = seat_pieces(behind, parts, seats, width)
    assert len(block) == 2 * seats
    for number in range(2):
        row = [piece for piece in block[number * seats : (number + 1) * seats] if piece]
        assert all(piece.slot // 3 == number for piece in row)
        wanted = [
            Piece(slot, start + done, min(width, count - done))
            for slot, (start, count) in behind.items()
            if slot // 3 == number
            for done in range(0, count, width)
        ]
        assert row == wanted[:seats]


def test_a_block_holds_what_its_pieces_say():
    parts, ids_SC = Parts(2, 2), np.arange(40).reshape(4, 10)
    follows_S = np.array([False, True, False, True])
    pieces = seat_pieces({1: (2, 5), 3: (0, 2), 0: (1, 1)}, parts, 3, 4)
    block = Block.of(pieces, parts, 4, ids_SC, follows_S)
    assert block.ids_BT.tolist() == [[12, 13, 14, 15, 16, 0, 0, 0, 1, 0, 0, 0], [30, 31] + [0] * 10]
    assert block.segment_BT.tolist() == [[2, 2, 2, 2, 2, 0, 0, 0, 1, 0, 0, 0], [4, 4] + [0] * 10]
    assert block.position_BT[0].tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4]
    assert block.row_A.tolist() == [1, 1, 0, 1, 2, 2]
    assert block.start_A.tolist() == [2, 6, 1, 0, 0, 0]
    assert block.follows_A.tolist() == [True, True, False, True, False, False]
    assert block.tokens == {1: 5, 0: 1, 3: 2}
