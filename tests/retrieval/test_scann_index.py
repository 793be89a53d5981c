"""ScaNN against exact search: recall, tuning, and errors."""

import numpy as np
import pytest

from memsearcher_jax.retrieval import scann_index
from memsearcher_jax.retrieval.config import MAX_TOP_N
from memsearcher_jax.retrieval.index import ExactIndex
from tests.retrieval.samples import clustered

VECTORS = clustered(8_000)


@pytest.fixture(scope="module")
def tree():
    return scann_index.build_tree(VECTORS)


def tuned(tree, recall, seed=2):
    probes = clustered(200, seed=seed)
    return scann_index.tune(tree, probes, ExactIndex(VECTORS).search(probes, 5)[0], recall)


def test_a_tuned_tree_reaches_its_target_recall(tree):
    index, queries = tuned(tree, 0.95), clustered(300, seed=1)
    assert index.leaves_searched < index.leaves, "clustered vectors do not need all leaves"
    ids, scores = index.search(queries, 5)
    assert scann_index.recall_at_n(ids, ExactIndex(VECTORS).search(queries, 5)[0]) > 0.93
    # Candidates are rescored in bfloat16.
    np.testing.assert_allclose(scores, np.take_along_axis(queries @ VECTORS.T, ids, 1), atol=5e-3)


def test_an_unreachable_recall_is_an_error(tree):
    message = r"ScaNN reaches a recall of 0\.000 in the exact top 5: lower retrieval\.target_recall"
    with pytest.raises(ValueError, match=message):
        scann_index.tune(tree, clustered(100, seed=3), np.full((100, 5), -7), 0.9)


def test_parallel_batches_equal_single_queries(tree):
    index, queries = tuned(tree, 0.95), clustered(70, seed=1)
    ids, scores = index.search(queries, 5)
    for row in range(0, 70, 7):
        alone_ids, alone_scores = index.search(queries[row : row + 1], 5)
        np.testing.assert_array_equal(alone_ids[0], ids[row])
        np.testing.assert_allclose(alone_scores[0], scores[row], atol=1e-6)


def test_results_do_not_depend_on_the_number_of_results(tree):
    """A searcher calls with the largest top_n of a batch."""
    index, queries = tuned(tree, 0.5), clustered(200, seed=1)
    ids, scores = index.search(queries, MAX_TOP_N)
    for top_n in (1, 5, 20):
        fewer_ids, fewer_scores = index.search(queries, top_n)
        np.testing.assert_array_equal(fewer_ids, ids[:, :top_n])
        np.testing.assert_array_equal(fewer_scores, scores[:, :top_n])


def test_short_results_are_padded(tree):
    """One leaf has fewer rows than the result; ScaNN pads it with row 0 and NaN."""
    index = tuned(tree, 0.01)
    ids, scores = index.search(VECTORS[:3], 5_000)
    assert ids.shape == (3, 5_000)
    assert (ids == -1).any()
    np.testing.assert_array_equal(ids == -1, np.isneginf(scores))
    for row in ids:
        found = row[row >= 0]
        assert len(set(found)) == len(found)
