"""Rankers turn queries into row numbers of a corpus: by vectors, by words, or by both.

Every ranking is `(ids_QN, scores_QN)`: row numbers (int64) and scores (float32), best first. A place that stays empty
has id -1 and score -inf; empty places come last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from memsearcher_jax.retrieval.encode import Encoder
from memsearcher_jax.retrieval.index import Index

Ranking = tuple[np.ndarray, np.ndarray]

DAMPING = 3.0
"""Of ranks, where they are added up. With 60, a passage that is tenth twice outdoes one that is first once: two legs
then agree on what is near the question, and lose the passage that only one of them can find."""


class Ranker(Protocol):
    def rank(self, queries: list[str], top_n: int) -> Ranking:
        """The ranking of each query, N at most `top_n`; the same query gives the same row in any batch."""


@dataclass(frozen=True)
class DenseRanker:
    """Ranks by inner products of vectors."""

    encoder: Encoder  # of queries
    index: Index

    def rank(self, queries: list[str], top_n: int) -> Ranking:
        vectors_QD = self.encoder(queries)
        ids_QN, scores_QN = self.index.search(vectors_QD, top_n)
        # Every inner product with a zero vector is 0, and the order of the rows would pass for a ranking.
        encoded_Q1 = vectors_QD.any(axis=1, keepdims=True)
        return np.where(encoded_Q1, ids_QN, -1), np.where(encoded_Q1, scores_QN, np.float32(-np.inf))


@dataclass(frozen=True)
class HybridRanker:
    """Ranks by the ranks that others give; see `fuse`.

    All legs rank to one fixed depth, so that the best five do not depend on how many were asked for. What the best
    passage names is one leg more: the second half of an answer stands where the first half points.
    """

    legs: tuple[Ranker, ...]
    weights: tuple[float, ...]  # of each leg
    depth: int = 100
    named: Callable[[int], np.ndarray] | None = None  # row -> the rows that its passage names, best first
    named_weight: float = 0.5

    def rank(self, queries: list[str], top_n: int) -> Ranking:
        depth = max(self.depth, top_n)
        with ThreadPoolExecutor(len(self.legs)) as pool:
            ids_LQN = [ids_QN for ids_QN, _ in pool.map(lambda leg: leg.rank(queries, depth), self.legs)]
        return padded([self._fused(ids_LN, top_n) for ids_LN in zip(*ids_LQN, strict=True)])

    def _fused(self, ids_LN: tuple[np.ndarray, ...], top_n: int) -> Ranking:
        best_1, _ = fuse(ids_LN, self.weights, 1)
        if self.named is None or not len(best_1):
            return fuse(ids_LN, self.weights, top_n)
        return fuse((*ids_LN, self.named(int(best_1[0]))), (*self.weights, self.named_weight), top_n)


def fuse(ids_LN: Sequence[np.ndarray], weight_L: Sequence[float], top_n: int) -> Ranking:
    """Reciprocal rank fusion: a row's score is the sum of weight / (DAMPING + rank) over the rankings that hold it.

    After Cormack, Clarke and Büttcher (2009), who damp by 60 and weigh all alike.

    Args:
      ids_LN: for each of L rankings, row numbers, best first; -1 is an empty place. Ranks count from 1.

    Returns:
      `(ids_N, scores_N)`, N at most `top_n`; equal scores are ordered by row number.
    """
    score_of: dict[int, float] = {}
    for ids_N, weight in zip(ids_LN, weight_L, strict=True):
        for rank, row in enumerate(ids_N[ids_N >= 0].tolist(), start=1):
            score_of[row] = score_of.get(row, 0.0) + weight / (DAMPING + rank)
    return best(np.array(list(score_of), np.int64), np.array(list(score_of.values()), np.float32), top_n)


def best(ids_R: np.ndarray, scores_R: np.ndarray, top_n: int) -> Ranking:
    """The `top_n` highest scores with their ids, best first; equal scores are ordered by id."""
    if len(ids_R) > top_n:
        kept = scores_R >= np.partition(scores_R, -top_n)[-top_n]  # with all that tie for the last place
        ids_R, scores_R = ids_R[kept], scores_R[kept]
    order_N = np.lexsort((ids_R, -scores_R))[:top_n]
    return ids_R[order_N], scores_R[order_N]


def padded(rankings: Sequence[Ranking]) -> Ranking:
    """Rankings `(ids_N, scores_N)` of single queries as one, as wide as the longest."""
    width = max((len(ids_N) for ids_N, _ in rankings), default=0)
    ids_QN = np.full((len(rankings), width), -1, np.int64)
    scores_QN = np.full((len(rankings), width), -np.inf, np.float32)
    for row, (ids_N, scores_N) in enumerate(rankings):
        ids_QN[row, : len(ids_N)], scores_QN[row, : len(scores_N)] = ids_N, scores_N
    return ids_QN, scores_QN
