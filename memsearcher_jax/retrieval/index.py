"""Nearest passages by inner product: exact search, and the folder that stores an index on disk.

An index folder contains `manifest.json`, the passages, the embeddings in shards, the encoder's fitted state and, for a
corpus too large for exact search, ScaNN's files. It can be moved. `builder/index_builder.py` writes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol
from zipfile import BadZipFile

import numpy as np

from memsearcher_jax.retrieval import scann_index
from memsearcher_jax.retrieval.builder.build_dir import DERIVED_FORMAT, MANIFEST, read_manifest, verify_files
from memsearcher_jax.retrieval.corpus import COLUMNS, Corpus, open_corpus
from memsearcher_jax.retrieval.vector_files import Dtype, EmbeddingShards, Vectors

FORMAT = 4  # of the folder; incremented when older readers would misread it
EMBEDDINGS, STATE, TREE = "embeddings", "encoder.npz", "scann"
MAX_BLOCK_SCORES = 1 << 26  # scores that exact search keeps in memory
MAX_BLOCK_FLOATS = 1 << 26  # floats of vectors that it reads from disk at a time
RESCORE_FLOATS = 1 << 16  # floats that are rescored at a time; fits into a core's cache
FLOAT32_ROUNDOFF = 2.0**-24


class Index(Protocol):
    def search(self, vectors_QD: np.ndarray, top_n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `(ids_QN, scores_QN)`: row numbers (int64) and inner products (float32), best first.

        N is `top_n`, or the number of rows if that is smaller. A place that an approximate search leaves empty has id
        -1 and score -inf.
        """
        ...


@dataclass(frozen=True)
class ExactIndex:
    """Exhaustive search, with scores rounded from float64 and equal scores ordered by row.

    BLAS rounds a product differently for other shapes and on other CPUs. It therefore only selects candidates, with a
    margin for its rounding error; their scores are computed again in a fixed order of summation. So the result does not
    depend on how queries are batched, how vectors are blocked, or on the CPU.
    """

    vectors_RD: Vectors  # float32 in memory, or shards on disk, which every search reads once
    _max_norms: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)  # by first row

    def search(self, vectors_QD: np.ndarray, top_n: int) -> tuple[np.ndarray, np.ndarray]:
        rows, size = self.vectors_RD.shape
        n, row_step = min(top_n, rows), max(1, MAX_BLOCK_FLOATS // size)
        vectors_QD = np.asarray(vectors_QD, np.float32)
        ids_QN = np.full((len(vectors_QD), n), -1, np.int64)
        scores_QN = np.full((len(vectors_QD), n), -np.inf, np.float32)
        for row in range(0, rows, row_step):
            block_BD = self.vectors_RD[row : row + row_step]
            if row not in self._max_norms:
                self._max_norms[row] = max_norm(block_BD)
            query_step = max(1, MAX_BLOCK_SCORES // len(block_BD))
            for start in range(0, len(vectors_QD), query_step):
                queries = slice(start, start + query_step)
                _merge_block(
                    ids_QN[queries], scores_QN[queries], vectors_QD[queries], block_BD, row, self._max_norms[row]
                )
        return ids_QN, scores_QN


def _merge_block(
    ids_QN: np.ndarray,
    scores_QN: np.ndarray,
    vectors_QD: np.ndarray,
    block_BD: np.ndarray,
    first_row: int,
    max_norm: float,
) -> None:
    """Update the best results of each query, in place, with those of one block of vectors."""
    n, size = ids_QN.shape[1], vectors_QD.shape[1]
    score_QB = vectors_QD @ block_BD.T
    last = len(block_BD) - min(n, len(block_BD))
    threshold_Q = np.maximum(np.partition(score_QB, last, axis=1)[:, last], scores_QN[:, -1])
    # A float32 inner product in any order of summation has an error of at most about size * roundoff * norms
    # (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1). Two scores have two such errors.
    margin_Q = 2 * (size + 8) * FLOAT32_ROUNDOFF * max_norm * np.linalg.norm(vectors_QD, axis=1)
    query_C, row_C = np.nonzero(score_QB >= (threshold_Q - margin_Q).astype(np.float32)[:, None])
    score_C = np.empty(len(query_C), np.float32)
    step = max(1, RESCORE_FLOATS // size)
    for start in range(0, len(query_C), step):
        chunk = slice(start, start + step)
        product_CD = np.multiply(vectors_QD[query_C[chunk]], block_BD[row_C[chunk]], dtype=np.float64)
        score_C[chunk] = product_CD.sum(axis=1)
    old_query, old_place = np.nonzero(ids_QN >= 0)
    query_C = np.concatenate([old_query, query_C])
    id_C = np.concatenate([ids_QN[old_query, old_place], row_C + first_row])
    score_C = np.concatenate([scores_QN[old_query, old_place], score_C])
    order_C = np.lexsort((id_C, -score_C, query_C))
    query_C, id_C, score_C = query_C[order_C], id_C[order_C], score_C[order_C]
    rank_C = np.arange(len(query_C)) - np.searchsorted(query_C, query_C)
    kept = rank_C < n
    ids_QN[query_C[kept], rank_C[kept]] = id_C[kept]
    scores_QN[query_C[kept], rank_C[kept]] = score_C[kept]


@dataclass(frozen=True)
class IndexConfig:
    """How an index is built; the manifest contains all of it."""

    encoder: str  # name of the encoder of the vectors
    index_type: Literal["scann", "exact"] = "scann"
    dtype: Dtype = "float32"  # of the embeddings on disk
    target_recall: float = 0.98  # of ScaNN's top five against exact search, on text from the corpus
    batch_size: int = 1024  # passages per call of the encoder
    shard_rows: int = 16_384  # passages per embedding file: the most work that an interruption loses


@dataclass(frozen=True)
class StoredIndex:
    corpus: Corpus
    index: Index
    encoder_state: Mapping[str, np.ndarray]
    manifest: Mapping[str, Any]


def open_index(
    directory: Path, *, encoder: str, index_type: Literal["scann", "exact"] = "scann", checksum: str = ""
) -> StoredIndex:
    """Open a folder that `build_index` wrote; texts are memory-mapped.

    Args:
      encoder: name of the encoder of the queries; must be that of the passages.
      index_type: "exact" opens every folder; "scann" only a folder built for it.
      checksum: of the corpus that the folder must contain; empty accepts any.

    Raises:
      FileNotFoundError, ValueError: one line with the reason and the way out.
    """
    manifest = _read_manifest(directory)
    config = manifest["config"]
    if checksum and manifest["checksum"] != checksum:
        raise ValueError(f"{directory}: was built from another corpus (checksum differs); rebuild the index")
    if config["encoder"] != encoder:
        raise ValueError(f'{directory}: was built with encoder "{config["encoder"]}", not "{encoder}"; rebuild it')
    if index_type == "scann" and config["index_type"] != "scann":
        raise ValueError(f"{directory}: was built for exact search; rebuild it, or set retrieval.index_type to exact")
    shards = embedding_shards(directory, manifest["passages"], manifest["dimensions"], IndexConfig(**config))
    with _explain_damage(directory):
        corpus = open_corpus(directory, manifest["checksum"])
        state = dict(np.load(directory / STATE)) if (directory / STATE).exists() else {}
        if len(corpus) != shards.rows or shards.missing():
            raise ValueError("its files disagree on the number of passages")
    if index_type == "scann" and manifest["tree"] is not None:
        tree = scann_index.TreeSettings(**manifest["tree"])
        return StoredIndex(corpus, scann_index.load_tree(directory / TREE, shards.rows, tree), state, manifest)
    vectors_RD = shards[:]
    with _explain_damage(directory):
        if not max_norm(vectors_RD) <= manifest["max_norm"]:
            raise ValueError("a vector is longer than all those that were stored")
    return StoredIndex(corpus, ExactIndex(vectors_RD), state, manifest)


def max_norm(vectors_RD: np.ndarray) -> float:
    """The largest norm; NaN or infinite if a number is."""
    return float(np.sqrt(np.einsum("rd,rd->r", vectors_RD, vectors_RD).max()))


def verify_index(directory: Path) -> int:
    """Compare all files of an index folder, and of the folders derived from it, with their checksums.

    Returns the number of bytes. Raises FileNotFoundError or ValueError, in one line.
    """
    total = 0
    _read_manifest(directory)
    for path in sorted(directory.rglob(MANIFEST)):
        with _explain_damage(path.parent):
            total += verify_files(path.parent, FORMAT if path.parent == directory else DERIVED_FORMAT)
    return total


def open_index_corpus(directory: Path) -> Corpus:
    """Open the passages of an index folder only. Raises FileNotFoundError or ValueError, in one line."""
    manifest = _read_manifest(directory, prefixes=COLUMNS)
    with _explain_damage(directory):
        return open_corpus(directory, manifest["checksum"])


@contextlib.contextmanager
def _explain_damage(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise ValueError(f"{directory}: is damaged or of another version ({error}); rebuild the index") from error


def embedding_shards(directory: Path, rows: int, size: int, config: IndexConfig) -> EmbeddingShards:
    return EmbeddingShards(directory / EMBEDDINGS, rows, size, config.dtype, config.shard_rows)


def _read_manifest(directory: Path, prefixes: tuple[str, ...] = ("",)) -> dict[str, Any]:
    path = directory / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{directory}: is not an index folder (no {MANIFEST})")
    with _explain_damage(directory):
        return read_manifest(directory, FORMAT, prefixes)
