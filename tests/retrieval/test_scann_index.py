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
    return scann_index.tune(tree, probes, ExactIndex(VECTORS).search(probes, 5), recall)


def test_a_tuned_tree_reaches_its_target_recall(tree):
    index, queries = tuned(tree, 0.95), clustered(300, seed=1)
    assert index.leaves_searched < index.leaves, "clustered vectors do not need all leaves"
    found = index.search(queries, 5)
    assert scann_index.mean_recall(found, ExactIndex(VECTORS).search(queries, 5)) > 0.93
    for query, (ids, scores) in zip(queries, found, strict=True):
        np.testing.assert_allclose(scores, VECTORS[ids] @ query, atol=5e-3)  # rescored in bfloat16


def test_an_unreachable_recall_is_an_error(tree):
    message = r"the recall of ScaNN is only 0\.000: lower retrieval\.target_recall"
    with pytest.raises(ValueError, match=message):
        scann_index.tune(tree, clustered(100, seed=3), [(np.full(5, -7), np.zeros(5))] * 100, 0.9)


def test_parallel_batches_equal_single_queries(tree):
    index, queries = tuned(tree, 0.95), clustered(70, seed=1)
    for row, (ids, scores) in enumerate(index.search(queries, 5)):
        ((alone_ids, alone_scores),) = index.search(queries[row : row + 1], 5)
        np.testing.assert_array_equal(alone_ids, ids)
        np.testing.assert_allclose(alone_scores, scores, atol=1e-6)


def test_results_do_not_depend_on_the_number_of_results(tree):
    """A searcher calls with the largest top_n of a batch."""
    index, queries = tuned(tree, 0.5), clustered(200, seed=1)
    found = index.search(queries, MAX_TOP_N)
    for top_n in (1, 5, 20):
        for fewer, more in zip(index.search(queries, top_n), found, strict=True):
            np.testing.assert_array_equal(fewer, [of_row[:top_n] for of_row in more])


def test_a_short_result_holds_no_row_twice(tree):
    """One leaf has fewer rows than the result; ScaNN pads it with row 0 and NaN."""
    for ids, scores in tuned(tree, 0.01).search(VECTORS[:3], 5_000):
        assert 0 < len(ids) == len(set(ids)) < 5_000 and np.isfinite(scores).all()
