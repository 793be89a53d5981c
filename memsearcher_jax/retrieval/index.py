"""Nearest passages by inner product: exact search, and the folder that stores an index on disk.

An index folder contains `manifest.json` and the passages. Unless it is searched by words alone it also has the
embeddings in shards, the encoder's fitted state and, for a corpus too large for exact search, ScaNN's files. It can be
moved. `builder/index_builder.py` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from memsearcher_jax.retrieval import scann_index
from memsearcher_jax.retrieval.builder.build_dir import MANIFEST, explain_damage, read_manifest
from memsearcher_jax.retrieval.corpus import Corpus, open_corpus
from memsearcher_jax.retrieval.ranking import NOTHING, Ranking, top_k
from memsearcher_jax.retrieval.vector_files import EmbeddingShards

FORMAT = 9  # of the folder; incremented when older readers would misread it
EMBEDDINGS = "embeddings"
STATE = "encoder.npz"
TREE = "scann"
MAX_BLOCK_SCORES = 1 << 26  # scores that exact search keeps in memory
MAX_BLOCK_FLOATS = 1 << 26  # floats of vectors that it reads from disk at a time
FLOAT32_ROUNDOFF = 2.0**-24


@dataclass(frozen=True)
class ExactIndex:
    """Exhaustive search, with scores rounded from float64 and equal scores ordered by row.

    BLAS rounds a product differently for other shapes and on other CPUs. It therefore only selects candidates, with a
    margin for its rounding error; their scores are computed again in a fixed order of summation. So the result does not
    depend on how queries are batched, how vectors are blocked, or on the CPU.
    """

    vectors_RD: np.ndarray  # float32; memory-mapped ones are read once by every search

    def search(self, vectors_QD: np.ndarray, top_n: int) -> list[Ranking]:
        vectors_QD = np.asarray(vectors_QD, np.float32)
        size = self.vectors_RD.shape[1]
        # A float32 inner product in any order of summation has an error of at most about size * roundoff * norms
        # (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1). Two scores have two such errors.
        error_Q = 2 * (size + 8) * FLOAT32_ROUNDOFF * self._max_norm * np.linalg.norm(vectors_QD, axis=1)
        best = [NOTHING] * len(vectors_QD)
        for first_row, block_BD in self._blocks():
            block_top = min(top_n, len(block_BD))
            step = max(1, MAX_BLOCK_SCORES // len(block_BD))
            for start in range(0, len(vectors_QD), step):
                scores_of_queries = vectors_QD[start : start + step] @ block_BD.T
                for query, score_B in enumerate(scores_of_queries, start):
                    lowest = np.partition(score_B, -block_top)[-block_top]
                    row_C = np.flatnonzero(score_B >= lowest - error_Q[query])
                    product_CD = np.multiply(vectors_QD[query], block_BD[row_C], dtype=np.float64)
                    score_C = product_CD.sum(axis=1).astype(np.float32)
                    ids_N, scores_N = best[query]
                    all_ids = np.append(ids_N, row_C + first_row)
                    all_scores = np.append(scores_N, score_C)
                    best[query] = top_k(all_ids, all_scores, top_n)
        return best

    def _blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        rows, size = self.vectors_RD.shape
        step = max(1, MAX_BLOCK_FLOATS // size)
        yield from ((row, self.vectors_RD[row : row + step]) for row in range(0, rows, step))

    @cached_property
    def _max_norm(self) -> float:
        return max(float(np.linalg.norm(block_BD, axis=1).max()) for _, block_BD in self._blocks())


Index = ExactIndex | scann_index.ScannIndex
"""`search(vectors_QD, top_n)` ranks the rows with the highest inner products: N is at most `top_n`."""


@dataclass(frozen=True)
class StoredIndex:
    corpus: Corpus
    index: Index
    encoder_state: Mapping[str, np.ndarray]


def open_index(
    directory: Path, *, encoder: str, index_type: Literal["scann", "exact"] = "scann", max_passage_tokens: int = 0
) -> StoredIndex:
    """Open a folder that `build_index` wrote; texts are memory-mapped.

    Args:
      encoder: name of the encoder of the queries; must be that of the passages.
      index_type: "exact" opens every folder with vectors; "scann" only a folder built for it.
      max_passage_tokens: must be that of the build; 0 for an encoder without tokens.

    Raises FileNotFoundError or ValueError, in one line with the reason and the way out.
    """
    manifest = read_index_manifest(directory)
    vectors = manifest["vectors"]
    if vectors is None:
        raise ValueError(f"{directory}: has no vectors: set retrieval.method to bm25, or delete it to rebuild it")
    wanted = {"encoder": encoder, "max_passage_tokens": max_passage_tokens or vectors["max_passage_tokens"]}
    for name, value in wanted.items():
        if vectors[name] != value:
            reason = f"was built with {name} {vectors[name]!r}, not {value!r}"
            settings = "retrieval.encoder, encoder_prompts and max_passage_tokens"
            raise ValueError(f"{directory}: {reason}: set {settings} as then, or rebuild it")
    if index_type == "scann" and manifest["index_type"] != "scann":
        raise ValueError(f"{directory}: was built for exact search: set retrieval.index_type to exact, or rebuild it")
    with explain_damage(directory):
        corpus = open_corpus(directory, manifest["checksum"])
        state = dict(np.load(directory / STATE)) if (directory / STATE).exists() else {}
    if index_type == "scann" and manifest["tree"] is not None:
        tree = scann_index.load_tree(directory / TREE, len(corpus), **manifest["tree"])
        return StoredIndex(corpus, tree, state)
    shards = EmbeddingShards(directory / EMBEDDINGS, len(corpus), vectors["size"], vectors["dtype"])
    return StoredIndex(corpus, ExactIndex(shards.read()), state)


def open_index_corpus(directory: Path) -> Corpus:
    """Open the passages of an index folder only. Raises FileNotFoundError or ValueError, in one line."""
    manifest = read_index_manifest(directory)
    with explain_damage(directory):
        return open_corpus(directory, manifest["checksum"])


def read_index_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of an index folder. Raises FileNotFoundError or ValueError, in one line."""
    if not (directory / MANIFEST).is_file():
        raise FileNotFoundError(f"{directory}: is not an index folder (no {MANIFEST})")
    with explain_damage(directory):
        return read_manifest(directory, FORMAT)
