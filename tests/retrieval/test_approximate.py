"""ScaNN against exact search: what it finds, how it is tuned, and what it says when it finds too little."""

import subprocess
import sys

import numpy as np
import pytest

from memsearcher_jax.retrieval import approximate
from memsearcher_jax.retrieval.index import ExactIndex


def clustered(rows, size=32, clusters=50, spread=0.5, seed=0):
    """Unit vectors around common centres: what a trained encoder's look like to an index."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((clusters, size))
    vectors = centres[rng.integers(clusters, size=rows)] + spread * rng.standard_normal((rows, size))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


VECTORS = clustered(8_000)


@pytest.fixture(scope="module")
def tree():
    return approximate.build_tree(VECTORS, approximate.shape_for(*VECTORS.shape))


def tuned(tree, recall, seed=2):
    probes = clustered(200, seed=seed)
    return approximate.tune(tree, probes, ExactIndex(VECTORS).search(probes, 5)[0], recall)


def test_scan_agrees_with_exact_search():
    queries = clustered(50, seed=1)
    ids, scores = approximate.scan(VECTORS[:500]).search(queries, 10)
    exact_ids, exact_scores = ExactIndex(VECTORS[:500]).search(queries, 10)
    assert approximate.recall_of(ids, exact_ids) == 1.0
    np.testing.assert_allclose(scores, exact_scores, atol=1e-5)


def test_a_tree_keeps_the_recall_it_was_asked_for(tree):
    index, queries = tuned(tree, 0.95), clustered(300, seed=1)
    assert index.settings.leaves_searched < index.settings.leaves, "clustered vectors need no full scan"
    assert index.settings.recall >= 0.95
    ids, scores = index.search(queries, 5)
    assert approximate.recall_of(ids, ExactIndex(VECTORS).search(queries, 5)[0]) > 0.93
    # Rows that are scored again are scored with bfloat16.
    np.testing.assert_allclose(scores, np.take_along_axis(queries @ VECTORS.T, ids, 1), atol=5e-3)


def test_a_higher_recall_costs_more(tree):
    lower, higher = (tuned(tree, recall).settings for recall in (0.8, 0.97))
    assert (higher.leaves_searched, higher.candidates) != (lower.leaves_searched, lower.candidates)
    assert higher.recall > lower.recall


def test_a_recall_out_of_reach_is_an_error(tree):
    """Random vectors crowd together, and bfloat16 orders some of them otherwise."""
    probes = clustered(100, seed=3)
    wrong = np.full((100, 5), -7)
    with pytest.raises(ValueError, match=r"ScaNN finds 0\.000 of the exact top 5 at most: lower retrieval\.recall"):
        approximate.tune(tree, probes, wrong, 0.9)


def test_a_batch_over_all_cores_gives_what_single_queries_give(tree):
    index, queries = tuned(tree, 0.95), clustered(70, seed=1)
    ids, scores = index.search(queries, 5)
    for row in range(0, 70, 7):
        alone_ids, alone_scores = index.search(queries[row : row + 1], 5)
        np.testing.assert_array_equal(alone_ids[0], ids[row])
        np.testing.assert_allclose(alone_scores[0], scores[row], atol=1e-6)


def test_a_short_result_is_marked(tree):
    """With one leaf searched a tree cannot fill a long result; ScaNN pads it with row 0 and NaN."""
    index = tuned(tree, 0.01)
    ids, scores = index.search(VECTORS[:3], 5_000)
    assert ids.shape == (3, 5_000)
    assert (ids == -1).any()
    np.testing.assert_array_equal(ids == -1, np.isneginf(scores))
    for row in ids:
        found = row[row >= 0]
        assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("rows", "size", "leaves", "block_size"),
    [(9_002, 384, 189, 2), (1_000_000, 384, 4_000, 2), (21_015_324, 768, 18_336, 3), (10_000, 1_024, 200, 4)],
)
def test_the_shape_follows_from_the_size(rows, size, leaves, block_size):
    shape = approximate.shape_for(rows, size)
    assert (shape.leaves, shape.block_size) == (leaves, block_size)


def test_a_disk_that_fills_up_is_an_error(tmp_path):
    """A limit on the size of files, in a process of its own, refuses what a full disk would."""
    program = (
        "import resource, signal, sys; from pathlib import Path; import numpy as np\n"
        "from memsearcher_jax.retrieval import approximate\n"
        "tree = approximate.build_tree(np.eye(300, 64, dtype=np.float32), approximate.TreeShape(4, 2))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, resource.RLIM_INFINITY))\n"
        "approximate.save_tree(tree, Path(sys.argv[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "scann"], capture_output=True, text=True)
    assert "OSError" in done.stderr
    assert "ScaNN cannot write its files" in done.stderr
