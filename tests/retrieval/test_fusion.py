import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.retrieval.fusion import HybridRetriever
from memsearcher_jax.retrieval.fusion import reciprocal_rank_fusion as fuse
from memsearcher_jax.retrieval.ranking import top_k


def ids(*rows):
    return np.array(rows, np.int64)


def test_fusion_sums_reciprocal_ranks():
    """Row 7 is second and first, row 3 first and absent, row 5 absent and second."""
    rows, scores = fuse([ranking(3, 7), ranking(7, 5)], [1.0, 0.5], 5)
    assert rows.tolist() == [7, 3, 5]
    assert scores == pytest.approx([1 / 5 + 0.5 / 4, 1 / 4, 0.5 / 5])


def test_equal_scores_share_a_rank():
    """Their order in the corpus must not beat the clear result of another retriever."""
    ties, dense = (ids(*range(50)), np.ones(50, np.float32)), ranking(49, 7, 0)
    rows, scores = fuse([ties, dense], [1.0, 1.0], 50)
    assert rows[:3].tolist() == [49, 7, 0]
    assert scores[:4] == pytest.approx([1 / 53 + 1 / 4, 1 / 53 + 1 / 5, 1 / 53 + 1 / 6, 1 / 53])


def ranking(*rows):
    """Rows with distinct scores, best first."""
    return ids(*rows), -np.arange(len(rows), dtype=np.float32)


@given(st.lists(st.integers(0, 3).map(float), max_size=20), st.integers(1, 8))
def test_top_k_equals_a_full_sort(scores, top_n):
    rows, sorted_scores = top_k(np.arange(len(scores)), np.array(scores, np.float32), top_n)
    expected = sorted(range(len(scores)), key=lambda row: (-scores[row], row))[:top_n]
    assert rows.tolist() == expected
    assert sorted_scores.tolist() == [scores[row] for row in expected]


class FixedRetriever:
    """A retriever that returns the first rows of a fixed ranking and records each `top_n`."""

    def __init__(self, *rows):
        self.rows, self.depths = ids(*rows), []

    def search(self, queries, top_n):
        self.depths.append(top_n)
        return [ranking(*self.rows[:top_n])] * len(queries)


def rows_of(retriever, *request):
    return [rows.tolist() for rows, _ in retriever.search(*request)]


def test_retrievers_rank_deeper_than_the_result():
    """Row 9 is first in neither ranking and best in their fusion."""
    retrievers = FixedRetriever(1, 9, 3), FixedRetriever(2, 9, 4)
    hybrid = HybridRetriever(retrievers, (1.0, 1.0), depth=3)
    assert rows_of(hybrid, ["a", "b"], 1) == [[9], [9]]
    assert rows_of(hybrid, ["a"], 5) == [[9, 1, 2, 3, 4]]
    assert [retriever.depths for retriever in retrievers] == [[3, 5], [3, 5]]


def test_links_of_the_best_passage_rise():
    """Row 9 is best in both rankings and links to itself, 4 and 7: 4 overtakes others."""
    retrievers = FixedRetriever(9, 2, 4), FixedRetriever(9, 3, 5)
    plain = HybridRetriever(retrievers, (1.0, 1.0), depth=3)
    assert rows_of(plain, ["a"], 5) == [[9, 2, 3, 4, 5]]
    linked = HybridRetriever(retrievers, (1.0, 1.0), depth=3, linked_rows={9: ids(9, 4, 7)}.__getitem__)
    ((rows, scores),) = linked.search(["a"], 5)
    assert rows.tolist() == [9, 4, 2, 3, 5]
    assert scores == pytest.approx([3 / 4, 1 / 6 + 1 / 5, 1 / 5, 1 / 5, 1 / 6])
