"""From queries to passages: the door through which everything else searches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from memsearcher_jax.agent.types import Passage
from memsearcher_jax.retrieval import approximate
from memsearcher_jax.retrieval.corpus import Corpus, corpus_of, read_corpus
from memsearcher_jax.retrieval.encode import Encoder, HashingEncoder, fit_hashing, hashing_name
from memsearcher_jax.retrieval.index import Index, IndexConfig, StoredIndex, build, open_index


@dataclass(frozen=True)
class RetrievalConfig:
    """What is searched, and how."""

    corpus: str = ""
    """A JSONL file of {"id", "contents"} passages, plain or .gz; empty: the embedded world."""
    index: str = ""
    """A folder with a built index, which then needs no corpus; empty: one is built in the run's folder."""
    kind: Literal["scann", "exact"] = "scann"
    """Approximate search by ScaNN, or every inner product."""
    encoder: Literal["hashing"] = "hashing"
    """What turns text into vectors; hashing needs no download."""
    encoder_size: int = 1_024
    """Dimensions of a hashed vector; each halving costs recall, see retrieval/encode.py."""
    embedding_dtype: Literal["float32", "float16"] = "float32"
    """Type of the stored embeddings."""
    recall: float = 0.98
    """Share of the exact top five that ScaNN must find when an index is built."""
    batch_limit: int = 1_024
    """Most texts that are encoded or searched for in one call."""


@dataclass(frozen=True)
class Searcher:
    """Batched search; the same queries give the same passages however they are batched."""

    corpus: Corpus
    index: Index
    encoder: Encoder
    batch_limit: int = 1_024

    def search(self, queries: list[str], top_n: int) -> list[list[Passage]]:
        """Return for each query, in order, up to `top_n` passages with their scores, best first.

        A query that occurs twice is searched for once. One without a word that can be encoded, an empty one for
        instance, finds nothing.
        """
        if top_n < 1:
            raise ValueError(f"top_n must be at least 1, found {top_n}")
        distinct = list(dict.fromkeys(query for query in queries if query.strip()))
        found: dict[str, list[Passage]] = {}
        for start in range(0, len(distinct), self.batch_limit):
            batch = distinct[start : start + self.batch_limit]
            found.update(zip(batch, self._search(batch, top_n), strict=True))
        return [list(found.get(query, ())) for query in queries]

    def _search(self, queries: list[str], top_n: int) -> list[list[Passage]]:
        vectors_QD = self.encoder(queries)
        ids_QN, scores_QN = self.index.search(vectors_QD, top_n)
        # Every inner product with a zero vector is 0, and the order of the rows would pass for a ranking.
        encoded_Q = vectors_QD.any(axis=1)
        return [
            [
                self.corpus.passage(int(row), float(score))
                for row, score in zip(ids_N, scores_N, strict=True)
                if row >= 0
            ]
            if encoded
            else []
            for encoded, ids_N, scores_N in zip(encoded_Q, ids_QN, scores_QN, strict=True)
        ]


def open_searcher(config: RetrievalConfig, directory: Path, embedded: Iterable[Passage]) -> Searcher:
    """Open the index that `config` names; where it names none, build one in `directory` unless it is there.

    Args:
      directory: where an index of our own lives, for instance `<run>/index`.
      embedded: the passages of the embedded world; read only where `config` names neither an index nor a corpus.

    Raises:
      FileNotFoundError, ValueError: one line that names the corpus or index that cannot serve, and why.
    """
    if config.kind == "scann":
        approximate.check_installed()
    corpus = read_corpus(config.corpus) if config.corpus else None
    if config.index:
        return _searcher(config, _open(config, Path(config.index), corpus.checksum if corpus else ""))
    if corpus is None:
        corpus = corpus_of(embedded)
    if not directory.exists():
        _build(config, corpus, directory)
    return _searcher(config, _open(config, directory, corpus.checksum))


def _open(config: RetrievalConfig, directory: Path, checksum: str) -> StoredIndex:
    return open_index(directory, encoder=hashing_name(config.encoder_size), kind=config.kind, checksum=checksum)


def _build(config: RetrievalConfig, corpus: Corpus, directory: Path) -> None:
    encoder = fit_hashing((corpus.contents[row] for row in range(len(corpus))), config.encoder_size)
    settings = IndexConfig(encoder.name, config.kind, config.embedding_dtype, config.recall, config.batch_limit)
    build(corpus, encoder, directory, settings, encoder_state={"idf": encoder.idf_F})


def _searcher(config: RetrievalConfig, stored: StoredIndex) -> Searcher:
    encoder = HashingEncoder(np.asarray(stored.encoder_state["idf"]), config.encoder_size)
    return Searcher(stored.corpus, stored.index, encoder, config.batch_limit)
