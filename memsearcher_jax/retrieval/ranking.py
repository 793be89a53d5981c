"""Rankings: pairs `(ids_QN, scores_QN)` of row numbers (int64) and scores (float32), best first.

An empty place has id -1 and score -inf; empty places come last. Equal scores are ordered by row number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Ranking = tuple[np.ndarray, np.ndarray]


def top_k(ids_R: np.ndarray, scores_R: np.ndarray, k: int) -> Ranking:
    """The `k` highest scores with their ids, best first; equal scores are ordered by id."""
    if len(ids_R) > k:
        kept = scores_R >= np.partition(scores_R, -k)[-k]  # including all ties for the last place
        ids_R, scores_R = ids_R[kept], scores_R[kept]
    order_N = np.lexsort((ids_R, -scores_R))[:k]
    return ids_R[order_N], scores_R[order_N]


def pad_rankings(rankings: Sequence[Ranking]) -> Ranking:
    """Stack rankings `(ids_N, scores_N)` of single queries, padded to the longest."""
    width = max((len(ids_N) for ids_N, _ in rankings), default=0)
    ids_QN = np.full((len(rankings), width), -1, np.int64)
    scores_QN = np.full((len(rankings), width), -np.inf, np.float32)
    for row, (ids_N, scores_N) in enumerate(rankings):
        ids_QN[row, : len(ids_N)], scores_QN[row, : len(scores_N)] = ids_N, scores_N
    return ids_QN, scores_QN
