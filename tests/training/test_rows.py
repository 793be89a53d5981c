"""Packing: every token of every sample exactly once, in order, and nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsearcher_jax.training.parts import split_rows
from memsearcher_jax.training.rows import Sample, pack

ROW_TOKENS = 24


def fill(rows):
    """Share of real tokens in the rows that hold any."""
    tokens_B = (rows.segment_BT > 0).sum(axis=1)
    return tokens_B.sum() / (np.count_nonzero(tokens_B) * rows.segment_BT.shape[1])


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
@given(samples_strategy(), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_every_sample_is_whole_and_in_order_exactly_once(samples, micro_rows, micro_batches, seed):
    rows_per_update = micro_rows * micro_batches
    rows = pack(samples, ROW_TOKENS, rows_per_update, np.random.default_rng(seed), micro_batches=micro_batches)
    assert rows.ids_BT.shape[1] == ROW_TOKENS and len(rows.ids_BT) % rows_per_update == 0

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


@settings(max_examples=60, deadline=None)
@given(samples_strategy(), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_mini_batches_are_even_and_what_is_empty_stands_at_their_end(samples, micro_rows, micro_batches, seed):
    rows_per_update = micro_rows * micro_batches
    rows = pack(samples, ROW_TOKENS, rows_per_update, np.random.default_rng(seed), micro_batches=micro_batches)
    used = np.count_nonzero(rows.segment_BT.any(axis=1))
    assert len(rows.ids_BT) < used + rows_per_update, "there is a mini-batch too many"
    filled = []
    for batch in rows.split(rows_per_update):
        parts_nB = split_rows(batch.segment_BT, micro_batches).any(axis=2)
        filled.append(int(parts_nB.any(axis=1).sum()))
        assert parts_nB.any(axis=1)[: filled[-1]].all()
    assert sum(filled) == -(-used // micro_rows)
    assert max(filled) - min(filled) <= 1


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
    assert len(rows.ids_BT) == 3 and fill(rows) == 1


def test_a_sample_goes_where_it_leaves_the_least():
    """The 2 behind the two of 11, though there is room behind the 14, which came first."""
    rows = pack([plain(n) for n in (14, 11, 11, 2)], ROW_TOKENS, 1, np.random.default_rng(0))
    assert sorted(tuple(np.unique(row[row > 0], return_counts=True)[1]) for row in rows.segment_BT) == [
        (11, 11, 2),
        (14,),
    ]


def lengths_of_rollouts(trajectories, rng):
    """(length, sampled tokens, turn) of every context, drawn like the workload of benchmarks/workload.py."""
    contexts = []
    for _ in range(trajectories):
        question, memory, turns = rng.integers(20, 61), 0, rng.integers(1, 7)
        for turn in range(turns):
            think, observation, new_memory = rng.integers(30, 151), rng.integers(300, 901), rng.integers(50, 401)
            length, sampled = 459 + question + memory + think, think
            if turn < turns - 1:
                length, sampled = length + observation + new_memory, sampled + new_memory
            contexts.append((length, sampled, turn))
            memory = new_memory
    return np.array(contexts)


@pytest.fixture(scope="module", params=range(3))
def rollouts(request):
    """Contexts of 600 trajectories in rows of 8,192, 64 of them a mini-batch; the advantage is the turn."""
    rng = np.random.default_rng(request.param)
    contexts = lengths_of_rollouts(600, rng)
    samples = [
        Sample(np.ones(length), np.zeros(length), np.arange(length) >= length - sampled, float(turn))
        for length, sampled, turn in contexts.tolist()
    ]
    return contexts, pack(samples, 8_192, 64, rng, micro_batches=8)


def test_rows_of_real_lengths_are_nearly_full(rollouts):
    contexts, rows = rollouts
    assert (rows.segment_BT > 0).sum() == contexts[:, 0].sum()
    assert fill(rows) >= 0.97


def test_mini_batches_have_all_turns_and_alike_numbers_of_trained_tokens(rollouts):
    contexts, rows = rollouts
    sampled_by_turn = np.bincount(contexts[:, 2], weights=contexts[:, 1]) / contexts[:, 1].sum()
    trained = []
    for batch in rows.split(64):
        trained.append(batch.mask_BT.sum() / np.count_nonzero(batch.segment_BT.any(axis=1)))
        shares = np.bincount(batch.advantage_BT[batch.mask_BT].astype(int), minlength=6) / batch.mask_BT.sum()
        # Of some 380 contexts drawn by chance a share of 0.32 is off by 0.024, in standard deviations.
        np.testing.assert_allclose(shares, sampled_by_turn, atol=0.1)
    assert len(trained) >= 5
    assert max(trained) < 1.02 * min(trained)


def test_the_rows_of_a_micro_batch_have_alike_numbers_of_trained_tokens(rollouts):
    _, rows = rollouts
    spreads = []
    for batch in rows.split(64):
        for part_BT in split_rows(batch.mask_BT, 8):
            trained = part_BT.sum(axis=1)
            spreads += [trained.max() / trained.mean()] if trained.min() else []
    whole = rows.mask_BT.sum(axis=1)
    assert np.mean(spreads) < 1.1 < whole.max() / whole[whole > 0].mean()


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
