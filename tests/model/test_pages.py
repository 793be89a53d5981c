"""Blocks in pieces, long rows and a shared prefix: what is read page by page equals one pass over each context."""

import jax.numpy as jnp
import numpy as np
import pytest

from memsearcher_jax.model import attention, pages, qwen
from memsearcher_jax.model.cache import Cache, Prefix, Reading, copy_rows

WIDTH = 64  # of a piece
HELD = (700, 0, 530, 511)  # tokens that each row holds beforehand: several pages, none, a little more than one
NEW = (130, 64, 1, 65)


@pytest.fixture
def contexts(base):
    draw = np.random.default_rng(0)
    return [draw.integers(0, base.vocab_size, held + new) for held, new in zip(HELD, NEW, strict=True)]


def whole(params, config, forward, ids_T):
    """The logits of one context, in one pass without a cache."""
    row = ids_T[None].astype(np.int32)
    return forward(params, config, row, np.arange(len(ids_T))[None], np.ones_like(row))[0][0]


def fill(params, config, forward, cache, texts):
    """The cache with these texts behind what its rows hold."""
    width = max(map(len, texts))
    ids_BT, real_BT = np.zeros((len(texts), width), np.int32), np.zeros((len(texts), width), np.int32)
    for row, text in enumerate(texts):
        ids_BT[row, : len(text)], real_BT[row, : len(text)] = text, 1
    position_BT = np.asarray(cache.length_B)[:, None] + np.arange(width)
    return forward(params, config, ids_BT, position_BT, real_BT, cache)[1]


def entries(cache, row, count=None):
    """The first keys and values of a row, as [L, K, H, C] and [L, K, C, H]."""
    k_LNKHP, v_LNKPH = np.asarray(cache.k_LBNKHP[:, row]), np.asarray(cache.v_LBNKPH[:, row])
    k_LKHC, v_LKCH = np.concatenate(np.moveaxis(k_LNKHP, 1, 0), -1), np.concatenate(np.moveaxis(v_LNKPH, 1, 0), -2)
    return k_LKHC[..., :count], v_LKCH[..., :count, :]


def block_of(contexts, order, seats):
    """The new tokens of these contexts, cut into pieces, in one row."""
    ids, position, segment, row, start = [], [], [], [], []
    for number in order:
        for at in range(HELD[number], HELD[number] + NEW[number], WIDTH):
            text = contexts[number][at : at + WIDTH]
            pad = WIDTH - len(text)
            ids += [*text, *[0] * pad]
            segment += [*[number + 1] * len(text), *[0] * pad]
            position += range(at, at + WIDTH)
            row.append(number)
            start.append(at)
    spare = seats - len(row)
    row, start = [*row, *[len(contexts)] * spare], [*start, *[0] * spare]
    ids, position, segment = (np.array([[*x, *[0] * spare * WIDTH]], np.int32) for x in (ids, position, segment))
    return ids, position, segment, np.array(row, np.int32), np.array(start, np.int32)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_pieces_of_a_block_see_their_own_rows_and_each_other(order, base, make_params, forward, contexts):
    """Wider than the blocks that bound memory, longer than a page, with a seat that nobody takes."""
    params = make_params(base)
    cache = fill(
        params,
        base,
        forward,
        Cache.empty(base, 4, 900),
        [ids_T[:held] for ids_T, held in zip(contexts, HELD, strict=True)],
    )
    ids_1T, position_1T, segment_1T, row_A, start_A = block_of(contexts, order, seats=8)
    assert ids_1T.shape[1] > 2 * attention.QUERY_BLOCK
    assert max(HELD) > pages.page_for(cache.capacity) + attention.QUERY_BLOCK
    logits_1TV, after = forward(
        params, base, ids_1T, position_1T, segment_1T, Reading.of(cache, row_A, jnp.asarray(start_A))
    )
    for number, ids_T in enumerate(contexts):
        expected_TV = whole(params, base, forward, ids_T)[HELD[number] :]
        np.testing.assert_allclose(logits_1TV[0][segment_1T[0] == number + 1], expected_TV, atol=2e-5)
    assert after.length_B.tolist() == [len(ids_T) for ids_T in contexts]
    # What was written is what one pass over the whole context writes.
    for row, ids_T in enumerate(contexts):
        alone = fill(params, base, forward, Cache.empty(base, 1, 900), [ids_T])
        for written, expected in zip(entries(after, row, len(ids_T)), entries(alone, 0, len(ids_T)), strict=True):
            np.testing.assert_allclose(written, expected, atol=2e-5)


def test_a_shared_prefix_is_as_good_as_ones_own(base, make_params, make_rows, forward):
    """Rows that begin with it hold only what comes after it; a row that does not is untouched by it."""
    params = make_params(base)
    ids_BT, *_ = make_rows(base, 3, 40)
    ids_BT[1, :12] = ids_BT[0, :12]  # rows 0 and 1 begin alike, row 2 on its own
    one = fill(params, base, forward, Cache.empty(base, 1, 16), [ids_BT[0, :12]])
    begins_B = np.array([True, True, False])
    cache = Cache.empty(base, 3, 48)
    texts = [ids_BT[0, 12:30], ids_BT[1, 12:20], ids_BT[2, :25]]
    for until in ((20, 14, 25), (30, 20, 25)):  # what stands before a block: nothing at first
        held_B = np.asarray(cache.length_B)
        width = 18
        ids_B18, real_B18 = np.zeros((3, width), np.int32), np.zeros((3, width), np.int32)
        base_B = np.where(begins_B, 12, 0)
        for row, (text, end) in enumerate(zip(texts, until, strict=True)):
            new = text[held_B[row] : end - base_B[row]][:width]
            ids_B18[row, : len(new)], real_B18[row, : len(new)] = new, 1
        position_B18 = (base_B + held_B)[:, None] + np.arange(width)
        reading = Reading.of(cache, prefix=Prefix(one, begins_B))
        logits_BTV, cache = forward(params, base, ids_B18, position_B18, real_B18, reading)
        for row in range(3):
            first, count = base_B[row] + held_B[row], real_B18[row].sum()
            expected_TV = whole(params, base, forward, ids_BT[row])[first : first + count]
            np.testing.assert_allclose(logits_BTV[row, :count], expected_TV, atol=2e-5)
    assert cache.length_B.tolist() == [18, 8, 25]


@pytest.mark.parametrize("capacity", [700, 1_100])
def test_copies_end_where_they_should(capacity, base):
    """Several pages; and nobody's row stays as it is."""
    draw = np.random.default_rng(0)
    empty = Cache.empty(base, 3, capacity)
    k_LBNKHP, v_LBNKPH = (draw.standard_normal(x.shape).astype(np.float32) for x in (empty.k_LBNKHP, empty.v_LBNKPH))
    cache = Cache(jnp.asarray(k_LBNKHP), jnp.asarray(v_LBNKPH), jnp.array([690, 3, 5], jnp.int32))
    copied = copy_rows(cache, jnp.array([0, 3]), jnp.array([1, 3]), jnp.array([690, 9]))
    assert copied.length_B.tolist() == [690, 690, 5]
    for after, before in zip(entries(copied, 1, 690), entries(cache, 0, 690), strict=True):
        np.testing.assert_array_equal(after, before)
    for row in (0, 2):
        for after, before in zip(entries(copied, row), entries(cache, row), strict=True):
            np.testing.assert_array_equal(after, before)


def test_rows_that_do_not_read_cost_and_change_nothing(base, make_params, make_rows, forward):
    params = make_params(base)
    ids_BT, *_ = make_rows(base, 2, 20)
    cache = fill(params, base, forward, Cache.empty(base, 2, 32), list(ids_BT[:, :10]))
    reading = Reading.of(cache, reads_A=jnp.array([True, False]))
    assert reading.length_A.tolist() == [10, 0]
    position_B1, ones_B1 = np.full((2, 1), 10), np.ones((2, 1), np.int32)
    logits_B1V, _ = forward(params, base, ids_BT[:, 10:11], position_B1, ones_B1, reading)
    expected_TV = whole(params, base, forward, ids_BT[0])
    np.testing.assert_allclose(logits_B1V[0, 0], expected_TV[10], atol=2e-5)
    alone_B1V, _ = qwen.forward(params, base, ids_BT[1:, 10:11], position_B1[1:], ones_B1[1:])
    np.testing.assert_allclose(logits_B1V[1], alone_B1V[0], atol=2e-5)


@pytest.mark.parametrize("most", [0, 1, 3, 8])
@pytest.mark.parametrize("cut", [1, 2])
def test_how_many_rows_are_read_side_by_side_changes_nothing(most, cut):
    """A CPU reads fewer of them than other machines do."""
    draw = np.random.default_rng(0)
    L, B, N, K, G, T, H, P = 2, 6, 3, 2, 2, 4, 8, 16
    q_BKGTH = draw.standard_normal((B // cut, K, G, T, H)).astype(np.float32)
    k_LBNKHP = draw.standard_normal((L, B, N, K, H, P)).astype(np.float32)
    v_LBNKPH = draw.standard_normal((L, B, N, K, P, H)).astype(np.float32)
    length_A = np.array([40, 0, 48, 1, 17, 16], np.int32)
    order_A = np.argsort(-length_A).astype(np.int32)
    pieces = (jnp.arange(B), jnp.asarray(length_A), jnp.asarray(order_A), jnp.argsort(order_A))
    found = pages.look_side_by_side(q_BKGTH, k_LBNKHP, v_LBNKPH, jnp.int32(1), *pieces, most)
    mixed_BKGTH = np.asarray(attention.join([attention.Partial(*found)]))
    for piece, length in enumerate(length_A):
        if length:
            row, first = piece // cut, piece % cut * (T // cut)
            k_KHS = np.concatenate(list(k_LBNKHP[1, piece]), axis=-1)[..., :length]
            v_KSH = np.concatenate(list(v_LBNKPH[1, piece]), axis=-2)[:, :length]
            mine = (row, slice(None), slice(None), slice(first, first + T // cut))
            score_KGTS = np.einsum("KGTH,KHS->KGTS", q_BKGTH[mine], k_KHS) * H**-0.5
            weight_KGTS = np.exp(score_KGTS - score_KGTS.max(-1, keepdims=True))
            expected_KGTH = np.einsum("KGTS,KSH->KGTH", weight_KGTS / weight_KGTS.sum(-1, keepdims=True), v_KSH)
            np.testing.assert_allclose(mixed_BKGTH[mine], expected_KGTH, atol=1e-5)
