"""Nearest passages by inner product: an exact index, and the folder that keeps it or a ScaNN index on disk.

A folder holds `manifest.json`, the passages, the embeddings in shards, the encoder's fitted state and, for a corpus
that is too large to scan, ScaNN's own files. It may be moved. `build.py` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol
from zipfile import BadZipFile

import numpy as np

from memsearcher_jax.retrieval import approximate
from memsearcher_jax.retrieval.corpus import Corpus, open_corpus
from memsearcher_jax.retrieval.vectors import Dtype, Rows, Shards

FORMAT = 2  # of the folder; raised when an older reader would misread a newer one
MANIFEST, EMBEDDINGS, STATE, TREE = "manifest.json", "embeddings", "encoder.npz", "scann"
EXACT_SCORES = 1 << 26  # scores that exact search holds at one time
EXACT_FLOATS = 1 << 26  # numbers of vectors that it holds beside them, where these are on disk


class Index(Protocol):
    def search(self, vectors_QD: np.ndarray, top_n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `(ids_QN, scores_QN)`: row numbers (int64) and inner products (float32), best first.

        N is `top_n`, or the number of rows where that is smaller. A place that an approximate search leaves empty
        has id -1 and score -inf.
        """


@dataclass(frozen=True)
class ExactIndex:
    """Every inner product, computed. The oracle of tests and builds, and good enough for some 100,000 passages."""

    vectors_RD: Rows  # float32 in memory, or shards on disk that are read once a search

    def search(self, vectors_QD: np.ndarray, top_n: int) -> tuple[np.ndarray, np.ndarray]:
        rows, size = self.vectors_RD.shape
        n, step = min(top_n, rows), max(1, EXACT_FLOATS // size)
        ids_QN, scores_QN = np.zeros((len(vectors_QD), 0), np.int64), np.zeros((len(vectors_QD), 0), np.float32)
        if not len(vectors_QD):
            return np.zeros((0, n), np.int64), np.zeros((0, n), np.float32)
        for start in range(0, rows, step):
            block_ids, block_scores = _top(vectors_QD, self.vectors_RD[start : start + step], n)
            ids_QN = np.concatenate([ids_QN, block_ids + start], axis=1)
            scores_QN = np.concatenate([scores_QN, block_scores], axis=1)
            # Equal scores are ordered by row.
            order_QN = np.lexsort((ids_QN, -scores_QN), axis=1)[:, :n]
            ids_QN = np.take_along_axis(ids_QN, order_QN, axis=1)
            scores_QN = np.take_along_axis(scores_QN, order_QN, axis=1)
        return ids_QN, scores_QN


def _top(vectors_QD: np.ndarray, block_BD: np.ndarray, top_n: int) -> tuple[np.ndarray, np.ndarray]:
    """The best rows of one block for every query, in no order."""
    n, step = min(top_n, len(block_BD)), max(1, EXACT_SCORES // len(block_BD))
    parts = []
    for start in range(0, len(vectors_QD), step):
        score_QB = np.asarray(vectors_QD[start : start + step], np.float32) @ block_BD.T
        ids_QN = np.argpartition(-score_QB, n - 1, axis=1)[:, :n]
        parts.append((ids_QN, np.take_along_axis(score_QB, ids_QN, axis=1)))
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([scores for _, scores in parts])


@dataclass(frozen=True)
class IndexConfig:
    """What a folder is built with; all of it is kept in the manifest."""

    encoder: str  # name of the encoder that made the vectors
    kind: Literal["scann", "exact"] = "scann"
    dtype: Dtype = "float32"  # of the embeddings on disk
    recall: float = 0.98  # of ScaNN's top five against exact search, on text from the corpus
    batch: int = 1024  # passages that one call of the encoder gets
    shard_rows: int = 16_384  # passages whose vectors are one file: what a kill costs at most


@dataclass(frozen=True)
class StoredIndex:
    """An opened folder."""

    corpus: Corpus
    index: Index
    encoder_state: Mapping[str, np.ndarray] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)


def open_index(
    directory: Path, *, encoder: str, kind: Literal["scann", "exact"] = "scann", checksum: str = ""
) -> StoredIndex:
    """Open a folder that `build.build` wrote; texts are memory-mapped.

    Args:
      encoder: name of the encoder that will embed the queries; must be the one that embedded the passages.
      kind: "exact" reads every folder; "scann" a folder that was built as such.
      checksum: of the corpus that the folder must hold; empty accepts any.

    Raises:
      FileNotFoundError, ValueError: one line that says why this folder cannot serve, and the way out.
    """
    manifest = _read_manifest(directory)
    config = manifest["config"]
    if checksum and manifest["checksum"] != checksum:
        raise ValueError(f"{directory}: was built from another corpus (checksum differs); build an index anew")
    if config["encoder"] != encoder:
        raise ValueError(f'{directory}: was built with encoder "{config["encoder"]}", not "{encoder}"; build anew')
    if kind == "scann" and config["kind"] != "scann":
        raise ValueError(f'{directory}: was built for exact search; build anew, or choose kind "exact"')
    shards = shards_of(directory, manifest["passages"], manifest["dimensions"], IndexConfig(**config))
    try:
        corpus = open_corpus(directory, manifest["checksum"])
        missing = shards.missing()
        state = dict(np.load(directory / STATE)) if (directory / STATE).exists() else {}
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise ValueError(f"{directory}: is damaged ({error}); build the index anew") from error
    if len(corpus) != shards.rows or missing:
        raise ValueError(f"{directory}: is damaged (its files disagree on the number of passages); build anew")
    return StoredIndex(corpus, _index(directory, kind, shards, manifest["tree"]), state, manifest)


def corpus_in(directory: Path) -> Corpus:
    """The passages of an index folder without its vectors. Raises FileNotFoundError or ValueError, in one line."""
    manifest = _read_manifest(directory)
    try:
        return open_corpus(directory, manifest["checksum"])
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{directory}: is damaged ({error}); build the index anew") from error


def shards_of(directory: Path, rows: int, size: int, config: IndexConfig) -> Shards:
    """The embeddings in an index folder, or in one that is being built."""
    return Shards(directory / EMBEDDINGS, rows, size, config.dtype, config.shard_rows)


def _index(directory: Path, kind: str, shards: Shards, tree: Mapping[str, Any] | None) -> Index:
    if kind == "scann" and tree is not None:
        return approximate.load_tree(directory / TREE, shards.rows, approximate.TreeSettings(**tree))
    return ExactIndex(shards[:]) if kind == "exact" else approximate.scan(shards[:])


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{directory}: is not an index folder (no manifest.json)")
    try:
        manifest = json.loads(path.read_bytes())
        written = manifest["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: is damaged; build the index anew") from error
    if written != FORMAT:
        raise ValueError(f"{path}: has format {written}, this version reads {FORMAT}; build the index anew")
    return manifest
