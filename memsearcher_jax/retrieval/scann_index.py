"""Approximate search by ScaNN.

Guo et al., "Accelerating Large-Scale Inference with Anisotropic Vector Quantization", ICML 2020.

A tree splits the vectors into leaves by k-means. A query scores quantised residuals in its nearest leaves and rescores
the best candidates with the full vectors, here in bfloat16. The shape of the tree follows from the number and the size
of the vectors. The leaves that a recall requires depend on the vectors much more than on their number: on 9,002
passages, hashed words need nearly all of 95 leaves, and clustered vectors one in ten. `tune` measures them.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from memsearcher_jax.retrieval.ranking import Ranking

MIN_TREE_ROWS = 20_000  # exact search of fewer takes about a millisecond a query
TOP = 5  # results whose recall is measured
# Rows per query that are rescored with full vectors. They are more than twice MAX_TOP_N: a search for fewer results
# then considers the same rows, and a query's results do not depend on the largest number of results in its batch.
CANDIDATES = 1_024
MAX_BLOCKS = 256  # of quantised dimensions; with more, ScaNN leaves its fastest path
SAMPLES_PER_LEAF = 50  # rows that train k-means
CODEBOOK_ROWS = 100_000  # rows that train the quantiser
SMALL_TREE_ROWS = 50_000  # trees of fewer rows have half as many leaves
MIN_THREAD_QUERIES = 8  # fewer queries are not worth another thread
ASSETS = "scann_assets.pbtxt"  # ScaNN's file names
PICKLED = "scann_docids.pkl"


@dataclass(frozen=True)
class ScannIndex:
    searcher: Any
    rows: int
    leaves: int
    leaves_searched: int  # for a query

    def search(self, vectors_QD: np.ndarray, top_n: int) -> list[Ranking]:
        if not len(vectors_QD):
            return []
        n = min(top_n, self.rows)
        limits = {"leaves_to_search": self.leaves_searched, "pre_reorder_num_neighbors": max(CANDIDATES, 2 * n)}
        queries_QD = np.ascontiguousarray(vectors_QD, np.float32)
        batch_size = max(MIN_THREAD_QUERIES, -(-len(queries_QD) // len(os.sched_getaffinity(0))))
        ids_QN, scores_QN = self.searcher.search_batched_parallel(queries_QD, n, **limits, batch_size=batch_size)
        found_QN = ~np.isnan(scores_QN)  # ScaNN pads a short result with row 0 and score NaN
        found = zip(ids_QN.astype(np.int64), scores_QN, found_QN, strict=True)
        return [(ids_N[found_N], scores_N[found_N]) for ids_N, scores_N, found_N in found]


def check_installed() -> None:
    """Raises ValueError, in one line, if ScaNN is not installed."""
    if importlib.util.find_spec("scann") is None:
        raise ValueError("ScaNN is not installed (it has wheels for Linux only): set retrieval.index_type to exact")


def leaves_for(rows: int) -> int:
    """How many leaves a tree of so many vectors has.

    More leaves mean more centres and fewer rows to score. Measured on 50,000 to 1,000,000 rows, 4 sqrt(rows) leaves
    give up to twice the queries/s of sqrt(rows). On 9,002 rows 2 sqrt(rows) are a quarter faster, since centres are
    then a larger part of the work.
    """
    return max(1, math.isqrt((4 if rows < SMALL_TREE_ROWS else 16) * rows))


def build_tree(vectors_RD: np.ndarray) -> ScannIndex:
    """Train and fill a tree, of which every leaf is searched: `tune` reduces that.

    `vectors_RD`, float32 and contiguous, may be memory-mapped; no reference to it is kept.
    """
    import scann  # not at the top: a config and `--help` do not need it

    rows, size = vectors_RD.shape
    leaves = leaves_for(rows)
    samples = min(rows, SAMPLES_PER_LEAF * leaves)
    sample_norms = np.linalg.norm(vectors_RD[:: max(1, rows // 1_000)], axis=1)
    builder: Any = scann.scann_ops_pybind.builder(vectors_RD, TOP, "dot_product")
    searcher = (
        builder.tree(
            num_leaves=leaves,
            num_leaves_to_search=leaves,
            training_sample_size=samples,
            # ScaNN dissolves leaves with less of the sample. Its default equals the average leaf here, so that half of
            # the leaves would be dissolved and a query would need several times as many.
            min_partition_size=max(1, samples // leaves // 5),
            spherical=bool(np.allclose(sample_norms, 1, atol=0.01)),
        )
        .score_ah(
            max(2, -(-size // MAX_BLOCKS)),  # codes of two dimensions are the finest that the fast path supports well
            anisotropic_quantization_threshold=0.2,
            training_sample_size=min(rows, CODEBOOK_ROWS),
        )
        .reorder(CANDIDATES, quantize=scann.ReorderType.BFLOAT16)
        .build()
    )
    return ScannIndex(searcher, rows, leaves, leaves_searched=leaves)


def tune(index: ScannIndex, queries_QD: np.ndarray, exact: Sequence[Ranking], target_recall: float) -> ScannIndex:
    """Return the same tree with the fewest leaves that reach `target_recall` of the queries' exact top five.

    Raises ValueError if all leaves do not reach it.
    """

    def recall(leaves: int) -> float:
        return mean_recall(replace(index, leaves_searched=leaves).search(queries_QD, TOP), exact)

    best = recall(index.leaves)
    if best < target_recall:
        raise ValueError(f"the recall of ScaNN is only {best:.3f}: lower retrieval.target_recall from {target_recall}")
    numbers = range(1, index.leaves)
    enough = 1 + bisect_left(numbers, target_recall, key=recall)
    return replace(index, leaves_searched=enough)


def mean_recall(results: Sequence[Ranking], exact: Sequence[Ranking]) -> float:
    """The share of the rows of exact rankings that are in the results of the same query."""
    is_found = list[np.ndarray]()
    for (found_N, _), (exact_N, _) in zip(results, exact, strict=True):
        is_found.append(np.isin(exact_N, found_N))
    return float(np.concatenate(is_found).mean())


def save_tree(index: ScannIndex, directory: Path) -> None:
    """Write the files that `load_tree` reads. Raises OSError if ScaNN cannot write, for instance on a full disk."""
    directory.mkdir()
    try:
        # Absolute paths would break when the folder is moved.
        index.searcher.serialize(str(directory), relative_path=True)
    except RuntimeError as error:  # ScaNN's only error for it
        raise OSError(f"{directory}: ScaNN cannot write its files ({error}); is the disk full?") from error


def load_tree(directory: Path, rows: int, leaves: int, leaves_searched: int) -> ScannIndex:
    import scann

    _check_trusted(directory)
    try:
        searcher = scann.scann_ops_pybind.load_searcher(str(directory), assets_backcompat_shim=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{directory}: ScaNN cannot read its files ({error}); delete it to rebuild it") from error
    if searcher.size() != rows:
        raise ValueError(f"{directory}: contains {searcher.size()} vectors, not {rows}; delete it to rebuild it")
    return ScannIndex(searcher, rows, leaves, leaves_searched)


def _check_trusted(directory: Path) -> None:
    """Raises ValueError for files that ScaNN would load and `save_tree` never writes.

    ScaNN unpickles document ids, which can execute code, and opens every file that its asset list names.
    """
    assets = directory / ASSETS
    text = assets.read_text(encoding="utf-8", errors="replace") if assets.is_file() else ""
    local = re.findall(r'asset_path: "[-.\w]+"', text)
    if (directory / PICKLED).exists() or len(local) != text.count("asset_path"):
        raise ValueError(f"{directory}: contains pickled ids or names files elsewhere: do not trust it, delete it")
