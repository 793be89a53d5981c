"""ScaNN (Guo et al., "Accelerating Large-Scale Inference with Anisotropic Vector Quantization", 2020).

A small corpus is scanned whole. A larger one is split into leaves by k-means; a query scores quantised residuals in
its nearest leaves, and the best of those again with the full vectors, here in bfloat16. The shape of the tree follows
from the number of vectors and their size. How many leaves and how many candidates a recall needs depends on the
vectors far more than on their number (on 9,002 passages hashed words need nearly all of 95 leaves, and clustered
vectors one in ten), so both are found by measuring, and kept.

`scann` is imported where it is used: a config is read, and `--help` printed, without it.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

SCAN_BELOW = 20_000  # rows; a scan of fewer takes well under a millisecond a query, and is exact
TOP = 5  # results whose recall is measured
CANDIDATES = (16, 32, 64, 128, 256, 512, 1_024)  # numbers of rows that may be scored again with full vectors
MOST_BLOCKS = 256  # of quantised dimensions; with more, ScaNN leaves its fastest path
WORTH_LEAVES = 4  # times the leaves that fewer candidates may cost and still be quicker
SAMPLED_PER_LEAF = 50  # rows that k-means looks at
ROWS_PER_CODEBOOK = 100_000  # rows that the quantiser is trained on
FEW_ROWS = 50_000  # below it, half as many leaves
FEW_QUERIES = 8  # that are not worth a second thread
ASSETS, PICKLED = "scann_assets.pbtxt", "scann_docids.pkl"  # ScaNN's names


@dataclass(frozen=True)
class TreeShape:
    """What is decided before a tree is built."""

    leaves: int
    block_size: int  # dimensions that share one quantised code


@dataclass(frozen=True)
class TreeSettings:
    """How a tree was built and is searched, and what it measured."""

    leaves: int
    block_size: int
    leaves_searched: int
    candidates: int  # rows of a query that are scored again with full vectors
    recall: float  # of the top five, on the probes that it was tuned with


@dataclass(frozen=True)
class ScannIndex:
    """An `Index` (see index.py) over ScaNN's searcher; `settings` is None where everything is scanned."""

    searcher: Any
    rows: int
    settings: TreeSettings | None = None

    def search(self, vectors_QD: np.ndarray, top_n: int) -> tuple[np.ndarray, np.ndarray]:
        n = min(top_n, self.rows)
        if not len(vectors_QD):
            return np.zeros((0, n), np.int64), np.zeros((0, n), np.float32)
        limits = {}
        if self.settings:
            limits["leaves_to_search"] = self.settings.leaves_searched
            limits["pre_reorder_num_neighbors"] = max(self.settings.candidates, 2 * n)
        queries_QD = np.ascontiguousarray(vectors_QD, np.float32)
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        if threads > 1 and len(queries_QD) > FEW_QUERIES:
            share = max(FEW_QUERIES, -(-len(queries_QD) // threads))
            found = self.searcher.search_batched_parallel(queries_QD, n, **limits, batch_size=share)
        else:
            found = self.searcher.search_batched(queries_QD, n, **limits)
        ids_QN, scores_QN = found
        # ScaNN pads a short result with row 0 and score NaN.
        empty_QN = np.isnan(scores_QN)
        return np.where(empty_QN, -1, ids_QN.astype(np.int64)), np.where(empty_QN, np.float32(-np.inf), scores_QN)


def check_installed() -> None:
    """Raises ValueError, in one line, where ScaNN is not."""
    if importlib.util.find_spec("scann") is None:
        raise ValueError("ScaNN is not installed (it has wheels for Linux only): set retrieval.kind to exact")


def scan(vectors_RD: np.ndarray) -> ScannIndex:
    """An index that scores every row; needs no training and no files."""
    import scann

    builder = scann.scann_ops_pybind.builder(np.ascontiguousarray(vectors_RD, np.float32), TOP, "dot_product")
    return ScannIndex(builder.score_brute_force().build(), len(vectors_RD))


def shape_for(rows: int, size: int) -> TreeShape:
    """The tree for so many vectors of so many dimensions.

    Many small leaves cost more centres to score and fewer rows; measured on 50,000 to 1,000,000 rows, 4 sqrt(rows)
    of them answer up to twice the queries/s of sqrt(rows). On 9,002 rows 2 sqrt(rows) are a quarter quicker: the
    centres are then a larger part of the work. Codes of two dimensions are the finest that pay, as long as ScaNN's
    fast path takes them.
    """
    return TreeShape(
        leaves=max(1, math.isqrt((4 if rows < FEW_ROWS else 16) * rows)), block_size=max(2, -(-size // MOST_BLOCKS))
    )


def build_tree(vectors_RD: np.ndarray, shape: TreeShape) -> ScannIndex:
    """Train and fill a tree. `vectors_RD`, float32 and contiguous, may be memory-mapped; no reference to it is kept.

    What comes back searches every leaf; `tune` finds how few will do.
    """
    import scann

    rows = len(vectors_RD)
    sampled = min(rows, SAMPLED_PER_LEAF * shape.leaves)
    searcher = (
        scann.scann_ops_pybind.builder(vectors_RD, TOP, "dot_product")
        .tree(
            num_leaves=shape.leaves,
            num_leaves_to_search=shape.leaves,
            training_sample_size=sampled,
            # ScaNN takes leaves with less of the sample apart. At its default, as much as the average leaf gets here,
            # that is half of them, and a query then needs many times the leaves.
            min_partition_size=max(1, sampled // shape.leaves // 5),
            spherical=_of_norm_1(vectors_RD),
        )
        .score_ah(
            shape.block_size,
            anisotropic_quantization_threshold=0.2,
            training_sample_size=min(rows, ROWS_PER_CODEBOOK),
        )
        .reorder(CANDIDATES[-1], quantize=scann.ReorderType.BFLOAT16)
        .build()
    )
    return ScannIndex(searcher, rows, TreeSettings(shape.leaves, shape.block_size, shape.leaves, CANDIDATES[-1], 0.0))


def tune(index: ScannIndex, probes_QD: np.ndarray, exact_QN: np.ndarray, recall: float) -> ScannIndex:
    """The same tree, searched in the quickest way that keeps `recall` of the probes' exact top five.

    The most candidates need the fewest leaves. From there on fewer candidates are tried with more leaves, as long as
    these stay a few, and the quickest pair wins: no step searches much more of the tree than the answer does.
    Raises ValueError if not even every leaf and the most candidates suffice.
    """
    enough: list[tuple[float, ScannIndex]] = []
    too_few, most = 0, index.settings.leaves
    for candidates in reversed(CANDIDATES):

        def measure(leaves: int, candidates: int = candidates) -> ScannIndex:
            return _measured(index, leaves, candidates, probes_QD, exact_QN)

        tried = _fewest_leaves(measure, too_few, most, recall)
        if tried is None:
            break
        enough.append((_seconds(tried, probes_QD), tried))
        too_few = tried.settings.leaves_searched - 1
        most = min(most, WORTH_LEAVES * tried.settings.leaves_searched)
    if not enough:
        best = _measured(index, index.settings.leaves, CANDIDATES[-1], probes_QD, exact_QN).settings.recall
        raise ValueError(f"ScaNN finds {best:.3f} of the exact top {TOP} at most: lower retrieval.recall from {recall}")
    return min(enough, key=lambda pair: pair[0])[1]


def _of_norm_1(vectors_RD: np.ndarray) -> bool:
    """Whether means of such vectors are better brought to norm 1 too: judged by a thousand rows."""
    some_RD = vectors_RD[:: max(1, len(vectors_RD) // 1_000)]
    return bool(np.allclose(np.linalg.norm(some_RD, axis=1), 1, atol=0.01))


def recall_of(found_QN: np.ndarray, exact_QN: np.ndarray) -> float:
    """Share of the exact results that are among the found ones."""
    return float((found_QN[:, :, None] == exact_QN[:, None, :]).any(axis=1).mean())


def save_tree(index: ScannIndex, directory: Path) -> None:
    """Write what `load_tree` reads. Raises OSError where ScaNN cannot write, on a full disk for instance."""
    directory.mkdir()
    try:
        # Without relative paths the files name the folder they were written in, and could not be moved.
        index.searcher.serialize(str(directory), relative_path=True)
    except RuntimeError as error:  # all that ScaNN says of it
        raise OSError(f"{directory}: ScaNN cannot write its files ({error}); is the disk full?") from error


def load_tree(directory: Path, rows: int, settings: TreeSettings) -> ScannIndex:
    """Read what `save_tree` wrote, from wherever it is now."""
    import scann

    _check_trusted(directory)
    try:
        searcher = scann.scann_ops_pybind.load_searcher(str(directory), assets_backcompat_shim=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{directory}: ScaNN cannot read its files ({error}); build the index anew") from error
    if searcher.size() != rows:
        raise ValueError(f"{directory}: holds {searcher.size()} vectors, not {rows}; build the index anew")
    return ScannIndex(searcher, rows, settings)


def _check_trusted(directory: Path) -> None:
    """Raises ValueError for what ScaNN would read and `save_tree` never writes.

    It unpickles the ids of documents where it finds some, which runs whatever they hold, and it opens every file that
    its list names.
    """
    listed = directory / ASSETS
    text = listed.read_text(encoding="utf-8", errors="replace") if listed.is_file() else ""
    named = re.findall(r'asset_path: "[-.\w]+"', text)
    if (directory / PICKLED).exists() or len(named) != text.count("asset_path"):
        raise ValueError(f"{directory}: holds pickled ids or names files elsewhere: do not trust it, build anew")


def _fewest_leaves(measure: Callable[[int], ScannIndex], too_few: int, most: int, recall: float) -> ScannIndex | None:
    """The fewest leaves above `too_few` with this recall, to within a twentieth; None if `most` have less.

    Doubles until it is enough, then halves the gap: the cost of a measurement grows with the leaves.
    """
    tried = measure(max(too_few + 1, most // 128))
    while tried.settings.recall < recall:
        too_few = tried.settings.leaves_searched
        if too_few == most:
            return None
        tried = measure(min(2 * too_few, most))
    while tried.settings.leaves_searched - too_few > max(1, too_few // 20):
        middle = measure((too_few + tried.settings.leaves_searched) // 2)
        if middle.settings.recall >= recall:
            tried = middle
        else:
            too_few = middle.settings.leaves_searched
    return tried


def _measured(index: ScannIndex, leaves: int, candidates: int, probes: np.ndarray, exact: np.ndarray) -> ScannIndex:
    tried = replace(index, settings=replace(index.settings, leaves_searched=leaves, candidates=candidates))
    found_QN, _ = tried.search(probes, TOP)
    return replace(tried, settings=replace(tried.settings, recall=recall_of(found_QN, exact)))


def _seconds(index: ScannIndex, probes_QD: np.ndarray, repeats: int = 5) -> float:
    """The quickest of several searches for all probes: what else the machine does only makes one slower."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        index.search(probes_QD, TOP)
        taken.append(time.perf_counter() - start)
    return min(taken)
