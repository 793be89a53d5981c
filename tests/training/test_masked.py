"""The empty-mask rule, and aggregation over packed rows."""

import numpy as np
import pytest

from memsearcher_jax.training import masked

AGGREGATES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
NORM_TOKENS = 5


def test_statistics_of_an_empty_mask_are_zero():
    x, nothing = np.array([1.0, np.nan, np.inf], np.float32), np.zeros(3, bool)
    for statistic in (masked.weighted_sum, masked.mean):
        assert statistic(x, nothing) == 0


@pytest.fixture
def sequences():
    """Values and masks of sequences of different lengths; the second has no trained token."""
    rng = np.random.default_rng(1)
    values = [rng.normal(size=n).astype(np.float32) for n in (5, 3, 7, 1, 4)]
    masks = [rng.random(len(v)) < 0.6 for v in values]
    masks[1][:] = False
    masks[0][2] = masks[2][0] = masks[4][1] = True
    return values, masks


def by_hand(values, masks, aggregate):
    sums = [v[m].sum() for v, m in zip(values, masks, strict=True)]
    counts = [m.sum() for m in masks]
    match aggregate:
        case "token-mean":
            return sum(sums) / sum(counts)
        case "seq-mean-token-sum":
            return np.mean(sums)
        case "seq-mean-token-mean":
            return np.mean([s / c for s, c in zip(sums, counts, strict=True) if c])
        case "seq-mean-token-sum-norm":
            return sum(sums) / NORM_TOKENS


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_aggregates_over_packed_and_unpacked_rows(sequences, aggregate):
    values, masks = sequences
    x_BT, mask_BT = np.full((3, 12), np.nan, np.float32), np.zeros((3, 12), bool)
    segment_BT = np.zeros((3, 12), np.int32)
    for row, start, segment, index in ((0, 0, 1, 0), (0, 5, 2, 1), (1, 0, 1, 3), (1, 1, 2, 2), (1, 8, 3, 4)):
        place = row, slice(start, start + len(values[index]))
        x_BT[place], mask_BT[place], segment_BT[place] = values[index], masks[index], segment
    packed = masked.weighted_sum(x_BT, masked.token_weights(mask_BT, aggregate, segment_BT, norm_tokens=NORM_TOKENS))

    x_RT, mask_RT = np.zeros((5, 7), np.float32), np.zeros((5, 7), bool)
    for row, (value, mask) in enumerate(zip(values, masks, strict=True)):
        x_RT[row, : len(value)], mask_RT[row, : len(value)] = value, mask
    one_segment = np.ones(mask_RT.shape, np.int32)
    unpacked = masked.weighted_sum(x_RT, masked.token_weights(mask_RT, aggregate, one_segment, norm_tokens=NORM_TOKENS))

    np.testing.assert_allclose(packed, by_hand(values, masks, aggregate), rtol=1e-5)
    np.testing.assert_allclose(unpacked, packed, rtol=1e-5)


@pytest.mark.parametrize(
    ("aggregate", "message"), [("seq-mean-token-sum-norm", "norm_tokens"), ("bogus", "token-mean")]
)
def test_invalid_aggregates_are_refused(aggregate, message):
    with pytest.raises(ValueError, match=message):
        masked.token_weights(np.ones((1, 2)), aggregate, np.ones((1, 2), np.int32))
