"""ScaNN (Guo et al., "Accelerating Large-Scale Inference with Anisotropic Vector Quantization", 2020).

A small corpus is scanned whole. A larger one is split into leaves by k-means; a query scores quantised residuals in
its nearest leaves, and the best of those again with the full vectors. How many leaves a recall needs depends on the
vectors far more than on their number (measured on 9,002 passages: hashed words need nearly all of 95 leaves, and
20,000 clustered vectors one in ten), so that number is found by measuring and kept.

`scann` is imported where it is used: a config is read, and `--help` printed, without it.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

SCAN_BELOW = 5_000  # rows; a scan of fewer is as quick as a tree, and exact
REORDERED = 200  # candidates that are scored again with full vectors
TOP = 5  # results whose recall is measured


@dataclass(frozen=True)
class TreeSettings:
    """How a tree was built, and what it measured."""

    leaves: int
    leaves_searched: int
    recall: float  # of the top five, on the probes


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
            limits["pre_reorder_num_neighbors"] = max(REORDERED, 2 * n)
        queries_QD = np.ascontiguousarray(vectors_QD, np.float32)
        ids_QN, scores_QN = self.searcher.search_batched(queries_QD, final_num_neighbors=n, **limits)
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

    builder = scann.scann_ops_pybind.builder(np.ascontiguousarray(vectors_RD), TOP, "dot_product")
    return ScannIndex(builder.score_brute_force().build(), len(vectors_RD))


def build_tree(vectors_RD: np.ndarray, probes_QD: np.ndarray, recall: float) -> ScannIndex:
    """Train a tree, then search it with as few leaves as keep `recall` of the probes' exact top five."""
    import scann

    rows = len(vectors_RD)
    leaves = math.isqrt(rows)
    searcher = (
        scann.scann_ops_pybind.builder(vectors_RD, TOP, "dot_product")
        .tree(num_leaves=leaves, num_leaves_to_search=leaves, training_sample_size=min(rows, 100 * leaves))
        .score_ah(2, anisotropic_quantization_threshold=0.2)
        .reorder(REORDERED)
        .build()
    )
    exact_QN, _ = scan(vectors_RD).search(probes_QD, TOP)
    searched = max(1, leaves // 32)
    while True:
        settings = TreeSettings(leaves, searched, recall=0.0)
        found_QN, _ = ScannIndex(searcher, rows, settings).search(probes_QD, TOP)
        measured = float((found_QN[:, :, None] == exact_QN[:, None, :]).any(axis=1).mean())
        if measured >= recall or searched == leaves:
            return ScannIndex(searcher, rows, replace(settings, recall=measured))
        searched = min(leaves, math.ceil(1.25 * searched))


def save_tree(index: ScannIndex, directory: Path) -> None:
    directory.mkdir()
    # Without relative paths the files name the folder they were written in, and could not be moved.
    index.searcher.serialize(str(directory), relative_path=True)


def load_tree(directory: Path, rows: int, settings: TreeSettings) -> ScannIndex:
    """Read what `save_tree` wrote, from wherever it is now."""
    import scann

    try:
        searcher = scann.scann_ops_pybind.load_searcher(str(directory), assets_backcompat_shim=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{directory}: ScaNN cannot read its files ({error}); build the index anew") from error
    if searcher.size() != rows:
        raise ValueError(f"{directory}: holds {searcher.size()} vectors, not {rows}; build the index anew")
    return ScannIndex(searcher, rows, settings)
