"""Packing: every token of every sample exactly once, in order, and nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsearcher_jax.training.rows import Sample, pack

ROW_TOKENS = 24


@st.composite
def samples_strategy(draw):
    """Samples whose ids are all different, so that a token can be followed into its row."""
    lengths = draw(st.lists(st.integers(1, ROW_TOKENS), min_size=1, max_size=20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    samples, next_id = [], 1
    for length in lengths:
        sampled = rng.random(length) < 0.5
        sampled[0] = False
        ids = tuple(range(next_id, next_id + length))
        samples.append(Sample(ids, tuple(-rng.random(length)), tuple(sampled), float(rng.normal())))
        next_id += length
    return samples


@settings(max_examples=60, deadline=None)
@given(samples_strategy(), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_every_sample_is_whole_and_in_order_exactly_once(samples, rows_multiple, seed):
    rows = pack(samples, ROW_TOKENS, rows_multiple, np.random.default_rng(seed))
    assert rows.ids_BT.shape[1] == ROW_TOKENS and len(rows.ids_BT) % rows_multiple == 0

    found = {}
    for row in range(len(rows.ids_BT)):
        segment_T = rows.segment_BT[row]
        tokens = int((segment_T > 0).sum())
        assert (segment_T[:tokens] > 0).all() and (np.diff(segment_T[:tokens]) >= 0).all()
        for segment in range(1, segment_T.max() + 1):
            place = row, segment_T == segment
            assert (rows.position_BT[place] == np.arange(place[1].sum())).all()
            found[tuple(rows.ids_BT[place])] = place
    assert sorted(found) == sorted(sample.ids for sample in samples)

    for sample in samples:
        place, sampled_T = found[sample.ids], np.array(sample.sampled)
        np.testing.assert_array_equal(rows.mask_BT[place], sampled_T)
        np.testing.assert_array_equal(rows.advantage_BT[place], np.float32(sample.advantage) * sampled_T)
        np.testing.assert_array_equal(rows.old_logprob_BT[place], np.float32(sample.logprobs) * sampled_T)

    padding_BT = rows.segment_BT == 0
    for name in ("ids_BT", "position_BT", "mask_BT", "advantage_BT", "old_logprob_BT"):
        assert not getattr(rows, name)[padding_BT].any()
    assert rows.fill == pytest.approx(sum(len(s.ids) for s in samples) / rows.ids_BT.size)


@settings(max_examples=20, deadline=None)
@given(samples_strategy(), st.integers(0, 100))
def test_the_same_seed_gives_the_same_rows(samples, seed):
    first, second = (pack(samples, ROW_TOKENS, 4, np.random.default_rng(seed)) for _ in range(2))
    for name in ("ids_BT", "position_BT", "segment_BT", "mask_BT", "advantage_BT", "old_logprob_BT"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def plain(length, first_id=1):
    return Sample(tuple(range(first_id, first_id + length)), (0.0,) * length, (False,) * length, 0.0)


def test_short_samples_fill_what_long_ones_leave():
    rng = np.random.default_rng(0)
    rows = pack([plain(n) for n in (10, 14, 20, 4, 24)], ROW_TOKENS, 1, rng)
    assert len(rows.ids_BT) == 3 and rows.fill == 1


def test_rows_come_in_an_order_that_is_not_the_length():
    samples = [plain(ROW_TOKENS - i % 12) for i in range(48)]
    rows = pack(samples, ROW_TOKENS, 1, np.random.default_rng(0))
    tokens_B = (rows.segment_BT > 0).sum(axis=1)
    assert (np.diff(tokens_B) > 0).any() and (np.diff(tokens_B) < 0).any()


def test_split_covers_the_rows_in_order():
    rows = pack([plain(20, 100 * i) for i in range(6)], ROW_TOKENS, 2, np.random.default_rng(0))
    parts = list(rows.split(2))
    assert len(parts) == 3 and all(part.ref_logprob_BT is None for part in parts)
    np.testing.assert_array_equal(np.concatenate([part.ids_BT for part in parts]), rows.ids_BT)
    with pytest.raises(ValueError, match="4"):
        next(rows.split(4))


def test_what_cannot_be_packed_is_refused_in_one_line():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"25 tokens.*row of 24.*training\.row_tokens"):
        pack([plain(25)], ROW_TOKENS, 1, rng)
    with pytest.raises(ValueError, match="nothing to pack"):
        pack([], ROW_TOKENS, 1, rng)
    with pytest.raises(ValueError, match="first token"):
        Sample((1, 2), (0.0, 0.0), (True, True), 0.0)
    with pytest.raises(ValueError, match="as many"):
        Sample((1, 2), (0.0,), (False, True), 0.0)
