import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.retrieval.ranking import HybridRanker, best, fuse, padded


def ids(*rows):
    return np.array(rows, np.int64)


def test_fusion_adds_the_reciprocals_of_ranks():
    """Row 7 is second and first, row 3 first and absent, row 5 absent and second: written out by hand."""
    rows, scores = fuse([ids(3, 7, -1), ids(7, 5)], [1.0, 0.5], 5)
    assert rows.tolist() == [7, 3, 5]
    assert scores == pytest.approx([1 / 5 + 0.5 / 4, 1 / 4, 0.5 / 5])


def split(weighted):
    return [leg for leg, _ in weighted], [weight for _, weight in weighted]


rankings = st.lists(st.lists(st.integers(0, 30), unique=True, max_size=12).map(lambda rows: ids(*rows)), max_size=4)


@given(rankings, st.integers(1, 12), st.randoms())
def test_fusion_does_not_mind_the_order_of_the_legs(legs, top_n, random):
    weighted = [(leg, 1.0 / number) for number, leg in enumerate(legs, start=1)]
    shuffled = random.sample(weighted, len(weighted))
    for one, other in zip(fuse(*split(weighted), top_n), fuse(*split(shuffled), top_n), strict=True):
        assert one == pytest.approx(other)


@given(rankings, st.integers(1, 12), st.integers(1, 12))
def test_fewer_results_are_the_first_of_more(legs, few, more):
    few, more = sorted((few, more))
    weights = [1.0] * len(legs)
    assert fuse(legs, weights, few)[0].tolist() == fuse(legs, weights, more)[0][:few].tolist()


@given(st.lists(st.integers(0, 3).map(float), max_size=20), st.integers(1, 8))
def test_best_is_what_sorting_everything_gives(scores, top_n):
    rows, found = best(np.arange(len(scores)), np.array(scores, np.float32), top_n)
    expected = sorted(range(len(scores)), key=lambda row: (-scores[row], row))[:top_n]
    assert rows.tolist() == expected
    assert found.tolist() == [scores[row] for row in expected]


def test_short_rankings_are_filled_up():
    ids_QN, scores_QN = padded([(ids(4), np.float32([2])), (ids(), np.float32([])), (ids(1, 2), np.float32([3, 1]))])
    assert ids_QN.tolist() == [[4, -1], [-1, -1], [1, 2]]
    assert scores_QN.tolist() == [[2, -np.inf], [-np.inf, -np.inf], [3, 1]]
    assert padded([])[0].shape == (0, 0)


class Fixed:
    """A ranker that gives the first rows of one ranking, and keeps how many were asked for."""

    def __init__(self, *rows):
        self.rows, self.asked = ids(*rows), []

    def rank(self, queries, top_n):
        self.asked.append(top_n)
        return padded([(self.rows[:top_n], np.zeros(len(self.rows[:top_n])))] * len(queries))


def test_legs_rank_deeper_than_the_result():
    """Row 9 is no leg's first, and yet the best of both."""
    legs = Fixed(1, 9, 3), Fixed(2, 9, 4)
    hybrid = HybridRanker(legs, (1.0, 1.0), depth=3)
    assert hybrid.rank(["a", "b"], 1)[0].tolist() == [[9], [9]]
    assert hybrid.rank(["a"], 5)[0].tolist() == [[9, 1, 2, 3, 4]]
    assert [leg.asked for leg in legs] == [[3, 5], [3, 5]]


def test_what_the_best_passage_names_rises():
    """Row 9 is the best of both legs and names 4 and 7: 4 outdoes what it stood behind, 7 comes in at the end."""
    legs = Fixed(9, 2, 4), Fixed(9, 3, 5)
    plain = HybridRanker(legs, (1.0, 1.0), depth=3)
    assert plain.rank(["a"], 5)[0].tolist() == [[9, 2, 3, 4, 5]]
    leading = HybridRanker(legs, (1.0, 1.0), depth=3, named={9: ids(4, 7)}.__getitem__, named_weight=0.5)
    rows_1N, scores_1N = leading.rank(["a"], 5)
    assert rows_1N.tolist() == [[9, 4, 2, 3, 5]]
    assert scores_1N[0] == pytest.approx([2 / 4, 1 / 6 + 0.5 / 4, 1 / 5, 1 / 5, 1 / 6])
    assert leading.rank(["a"], 6)[0].tolist() == [[9, 4, 2, 3, 5, 7]]
    assert leading.rank(["a", "b"], 1)[0].tolist() == [[9], [9]]


def test_nothing_found_names_nothing():
    hybrid = HybridRanker((Fixed(), Fixed(-1)), (1.0, 1.0), named={}.__getitem__)
    assert hybrid.rank(["a"], 5)[0].shape == (1, 0)
