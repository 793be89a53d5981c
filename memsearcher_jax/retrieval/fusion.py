"""Retrievers turn queries into row numbers of a corpus: by dense vectors, by words, or by a fusion of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from memsearcher_jax.retrieval.hashing_encoder import Encoder
from memsearcher_jax.retrieval.index import Index
from memsearcher_jax.retrieval.ranking import NOTHING, Ranking, top_k

RRF_K = 3.0
"""Added to ranks in reciprocal rank fusion. With the usual 60, a passage ranked tenth twice beats one ranked first
once: passages that are merely near the question then displace those that only one retriever finds."""


class Retriever(Protocol):
    def search(self, queries: list[str], top_n: int) -> list[Ranking]:
        """Return the ranking of each query, with N at most `top_n`. It does not depend on the other queries."""
        ...


@dataclass(frozen=True)
class DenseRetriever:
    encoder: Encoder  # of queries
    index: Index

    def search(self, queries: list[str], top_n: int) -> list[Ranking]:
        vectors_QD = self.encoder(queries)
        # Every inner product with a zero vector is 0, and the order of the rows would look like a ranking.
        nonzero_Q = np.asarray(vectors_QD.any(axis=1))
        rankings = [NOTHING] * len(queries)
        found = self.index.search(vectors_QD[nonzero_Q], top_n)
        for query, ranking in zip(np.flatnonzero(nonzero_Q).tolist(), found, strict=True):
            rankings[query] = ranking
        return rankings


@dataclass(frozen=True)
class HybridRetriever:
    """Ranks by reciprocal rank fusion of other retrievers.

    All retrievers rank to a fixed depth, so that the first results do not depend on `top_n`. The passages to which the
    best passage links form one more ranking, of weight 1: a multi-hop question needs the passage that its first passage
    names.
    """

    retrievers: tuple[Retriever, ...]
    weights: tuple[float, ...]  # of each retriever
    depth: int = 100
    linked_rows: Callable[[int], np.ndarray] | None = None  # row -> the rows to which its passage links, best first

    def search(self, queries: list[str], top_n: int) -> list[Ranking]:
        depth = max(self.depth, top_n)
        with ThreadPoolExecutor(len(self.retrievers)) as pool:
            batches = pool.map(lambda retriever: retriever.search(queries, depth), self.retrievers)
            return [self._fuse(rankings, top_n) for rankings in zip(*batches, strict=True)]

    def _fuse(self, rankings: Sequence[Ranking], top_n: int) -> Ranking:
        best_rows, _ = reciprocal_rank_fusion(rankings, self.weights, 1)
        if self.linked_rows is None or not len(best_rows):
            return reciprocal_rank_fusion(rankings, self.weights, top_n)
        linked_N = self.linked_rows(int(best_rows[0]))
        links = linked_N, -np.arange(len(linked_N), dtype=np.float32)
        return reciprocal_rank_fusion((*rankings, links), (*self.weights, 1.0), top_n)


def reciprocal_rank_fusion(rankings: Sequence[Ranking], weights: Sequence[float], top_n: int) -> Ranking:
    """Score each row by the sum of weight / (RRF_K + rank) over the rankings that contain it.

    After Cormack, Clarke and Büttcher (SIGIR 2009), who use K = 60 and equal weights. The rank of a row is the number
    of rows with at least its score: equal scores share a rank, and a score that many rows share says little. The
    rankings are those of one query; N of the result is at most `top_n`.
    """
    fused: dict[int, float] = {}
    for (ids_N, scores_N), weight in zip(rankings, weights, strict=True):
        rank_N = np.searchsorted(-scores_N, -scores_N, side="right")
        for row, rank in zip(ids_N.tolist(), rank_N.tolist(), strict=True):
            fused[row] = fused.get(row, 0.0) + weight / (RRF_K + rank)
    return top_k(np.array(list(fused), np.int64), np.array(list(fused.values()), np.float32), top_n)
