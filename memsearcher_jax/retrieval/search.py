"""From queries to passages: the interface to search for all other packages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from memsearcher_jax.retrieval import scann_index
from memsearcher_jax.retrieval.bm25 import open_bm25
from memsearcher_jax.retrieval.builder.build_dir import BM25, MANIFEST
from memsearcher_jax.retrieval.builder.index_builder import build_index
from memsearcher_jax.retrieval.config import HASHING, RetrievalConfig
from memsearcher_jax.retrieval.corpus import Corpus, make_corpus, read_corpus
from memsearcher_jax.retrieval.fusion import DenseRetriever, HybridRetriever, Retriever
from memsearcher_jax.retrieval.hashing_encoder import HashingEncoder, TextEncoder, fit_hashing, hashing_name
from memsearcher_jax.retrieval.index import IndexConfig, open_index, open_index_corpus
from memsearcher_jax.retrieval.lru_cache import LRUCache
from memsearcher_jax.retrieval.search_process import SearchProcess
from memsearcher_jax.retrieval.server.client import CallPolicy, SearchClient
from memsearcher_jax.retrieval.title_links import open_title_links
from memsearcher_jax.types import Passage

TITLES = f"{BM25}/titles"  # folder of the BM25 index of titles
LINKS = f"{BM25}/links"  # folder of the title links
WEIGHTS = (1.0, 1.0, 0.5)  # of vectors, BM25 and BM25 of titles in the hybrid ranking
MAX_CACHED_CHARS = 1_000  # longer queries are not cached


class Source(Protocol):
    def search(self, queries: list[str], top_n: int) -> list[list[Passage]]:
        """Return up to `top_n` passages for each query, best first. Queries are unique and not blank."""
        ...


@dataclass(frozen=True)
class LocalSource:
    """A `Source` in this process."""

    corpus: Corpus
    retriever: Retriever

    @property
    def info(self) -> dict[str, Any]:
        """What a search service says about itself."""
        return {"passages": len(self.corpus)}

    def search(self, queries: list[str], top_n: int) -> list[list[Passage]]:
        ids_QN, scores_QN = self.retriever.search(queries, top_n)
        return [
            [self.corpus.passage(row, score) for row, score in zip(ids_N, scores_N, strict=True) if row >= 0]
            for ids_N, scores_N in zip(ids_QN.tolist(), scores_QN.tolist(), strict=True)
        ]


@dataclass(frozen=True)
class Searcher:
    source: Source
    max_batch_size: int = 1_024
    cache: LRUCache[tuple[str, int], list[Passage]] = field(default_factory=partial(LRUCache, 0), repr=False)

    def search(self, queries: list[str], top_n: int) -> list[list[Passage]]:
        """Return up to `top_n` passages with their scores for each query, in order, best first.

        A query that occurs twice, or is in the cache, is not searched again. A query without a word has no results.

        Raises:
          ValueError: `top_n` is below 1, or a search service rejects the queries.
          OSError: a search service is unavailable.
        """
        if top_n < 1:
            raise ValueError(f"top_n must be at least 1, found {top_n}")
        results = {query: self.cache.get((query, top_n)) for query in queries}
        new = [query for query, passages in results.items() if passages is None and query.strip()]
        for start in range(0, len(new), self.max_batch_size):
            batch = new[start : start + self.max_batch_size]
            for query, passages in zip(batch, self.source.search(batch, top_n), strict=True):
                results[query] = passages
                if len(query) <= MAX_CACHED_CHARS:
                    self.cache.put((query, top_n), passages)
        return [list(results[query] or ()) for query in queries]


def build_dense_index(
    config: RetrievalConfig,
    corpus: Corpus,
    directory: Path,
    model: TextEncoder | None,
    shard_rows: int = IndexConfig.shard_rows,
    **options: Any,
) -> str:
    """Build or continue the vectors of a corpus, by `model` or the hashing encoder. Returns the encoder's name.

    `options` are those of `build_index`, which this function raises as.
    """
    state: dict[str, np.ndarray] = {}
    if model is None:
        hashing = fit_hashing((passage.contents for passage in corpus), config.encoder_size)
        model, state = TextEncoder(hashing_name(config.encoder_size), hashing, hashing), {"idf": hashing.idf_F}
    index_config = IndexConfig(
        model.name,
        config.index_type,
        config.embedding_dtype,
        config.target_recall,
        config.max_batch_size,
        shard_rows,
    )
    build_index(corpus, model.passages, directory, index_config, state, query_encoder=model.queries, **options)
    return model.name


def open_searcher(
    config: RetrievalConfig,
    directory: Path,
    passages: Iterable[Passage],
    load_encoder: Callable[[RetrievalConfig], TextEncoder] | None = None,
    max_outage: float = 0.0,
    search_timeout: float = 30.0,
) -> Searcher:
    """Open the service or the index that `config` names; if it names none, build an index in `directory`.

    A corpus or an index from files is searched in a process of its own, see `SearchProcess`. The synthetic encyclopedia
    is searched in this process: it is small and in memory, so that its search cannot hang.

    Args:
      directory: folder of the run's index, for instance `<run>/index`; an existing index is opened, not rebuilt.
      passages: those of the synthetic encyclopedia; read only if `config` names neither an index nor a corpus.
      load_encoder: reads the folder `config.encoder`, if it is one.
      max_outage: seconds to wait for a service that is down.
      search_timeout: seconds without an answer after which the process that searches is replaced.

    Raises:
      OSError, ValueError: one line with the service, corpus or index that cannot be used, and the reason.
    """
    source: Source
    if config.url:
        if config.corpus or config.index:
            raise ValueError(
                "retrieval.url names a service with a corpus of its own: leave out retrieval.corpus and index"
            )
        source = SearchClient(config.url, CallPolicy(config.timeout, config.max_attempts))
        source.check(max_outage)
    else:
        model = None
        if config.method != "bm25" and config.encoder != HASHING:
            if load_encoder is None:
                raise ValueError(f"retrieval.encoder {config.encoder!r} is unknown here: set it to {HASHING}")
            model = load_encoder(config)
        if not config.corpus and not config.index:
            source = open_source(config, directory, passages, model)
        else:
            if model and not config.index and not (directory / MANIFEST).exists():
                build_dense_index(config, read_corpus(config.corpus), directory, model)
            source = SearchProcess(config, directory, model, search_timeout)
    return Searcher(source, config.max_batch_size, LRUCache(config.query_cache_size))


def open_source(
    config: RetrievalConfig, directory: Path, passages: Iterable[Passage] = (), model: TextEncoder | None = None
) -> LocalSource:
    """As `open_searcher`, for an index in this process. `model` is the encoder unless it is the hashing encoder."""
    if config.method != "bm25" and config.index_type == "scann":
        scann_index.check_installed()
    corpus = read_corpus(config.corpus) if config.corpus else None if config.index else make_corpus(passages)
    dense = None
    if config.method != "bm25":
        dense, corpus = _open_dense(config, corpus, directory, model)
        if config.method == "dense":
            return LocalSource(corpus, dense)
    corpus = corpus or open_index_corpus(Path(config.index))
    words = open_bm25(corpus, _derived_dir(config, directory, BM25))
    if dense is None:
        return LocalSource(corpus, words)
    titles = open_bm25(corpus, _derived_dir(config, directory, TITLES), "title")
    links = open_title_links(corpus, _derived_dir(config, directory, LINKS))
    retrievers = (dense, words, titles)
    return LocalSource(
        corpus,
        HybridRetriever(retrievers, WEIGHTS, linked_rows=lambda row: links.linked_rows(corpus.contents[row])),
    )


def _derived_dir(config: RetrievalConfig, directory: Path, name: str) -> Path:
    """The folder in the configured index if it exists, else in the run's index: the user's index is not changed."""
    existing = Path(config.index, name)
    return existing if config.index and existing.exists() else directory / name


def _open_dense(
    config: RetrievalConfig, corpus: Corpus | None, directory: Path, model: TextEncoder | None
) -> tuple[DenseRetriever, Corpus]:
    if corpus is not None and not config.index and not (directory / MANIFEST).exists():
        build_dense_index(config, corpus, directory, model)
    name = model.name if model else hashing_name(config.encoder_size)
    checksum = corpus.checksum if corpus else ""
    stored = open_index(Path(config.index or directory), encoder=name, index_type=config.index_type, checksum=checksum)
    queries = model.queries if model else HashingEncoder(np.asarray(stored.encoder_state["idf"]), config.encoder_size)
    return DenseRetriever(queries, stored.index), stored.corpus
