"""Rankings of one query: `(ids_N, scores_N)`, row numbers (int64) and scores (float32), best first.

Equal scores are ordered by row number.
"""

from __future__ import annotations

import numpy as np

Ranking = tuple[np.ndarray, np.ndarray]
NOTHING: Ranking = np.zeros(0, np.int64), np.zeros(0, np.float32)


def top_k(ids_R: np.ndarray, scores_R: np.ndarray, k: int) -> Ranking:
    """The `k` highest scores with their ids, best first; equal scores are ordered by id."""
    if len(ids_R) > k:
        kept = scores_R >= np.partition(scores_R, -k)[-k]  # including all ties for the last place
        ids_R = ids_R[kept]
        scores_R = scores_R[kept]
    order_N = np.lexsort((ids_R, -scores_R))[:k]
    return ids_R[order_N], scores_R[order_N]
