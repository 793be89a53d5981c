"""From queries to passages: the door through which everything else searches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from memsearcher_jax.agent.types import Passage
from memsearcher_jax.retrieval import approximate
from memsearcher_jax.retrieval.bm25 import open_bm25
from memsearcher_jax.retrieval.build import build
from memsearcher_jax.retrieval.cache import RecentlyUsed
from memsearcher_jax.retrieval.client import SearchService
from memsearcher_jax.retrieval.config import HASHING, RetrievalConfig
from memsearcher_jax.retrieval.corpus import Corpus, corpus_of, read_corpus
from memsearcher_jax.retrieval.encode import Encoder, HashingEncoder, fit_hashing, hashing_name
from memsearcher_jax.retrieval.index import IndexConfig, StoredIndex, corpus_in, open_index
from memsearcher_jax.retrieval.names import open_names
from memsearcher_jax.retrieval.ranking import DenseRanker, HybridRanker, Ranker
from memsearcher_jax.retrieval.sharded import ShardedSource, Source

BM25 = "bm25"  # folder of the words, in the folder of the vectors
TITLES = "titles"  # folder of the words of the titles, in the folder of the words
NAMES = "names"  # folder of the titles as names, likewise
WEIGHTS = (1.0, 1.0, 0.5)  # of vectors, words and titles in a hybrid ranking
NAMED_WEIGHT = 0.5  # of the passages that the best one names: alone, the first of them ranks as a leg's fifth
CACHED_LENGTH = 1_000  # characters; a longer query is not worth its memory


@dataclass(frozen=True)
class LocalSource:
    """The corpus and its ranking in this process."""

    corpus: Corpus
    ranker: Ranker
    scale: str = ""  # what its scores mean: those of two sources can be compared if this is the same

    def find(self, queries: list[str], top_n: int) -> list[list[Passage]]:
        ids_QN, scores_QN = self.ranker.rank(queries, top_n)
        return [
            [self.corpus.passage(row, score) for row, score in zip(ids_N, scores_N, strict=True) if row >= 0]
            for ids_N, scores_N in zip(ids_QN.tolist(), scores_QN.tolist(), strict=True)
        ]


@dataclass(frozen=True)
class Searcher:
    """Batched search; the same queries give the same passages however they are batched."""

    source: Source
    batch_limit: int = 1_024
    cache: RecentlyUsed = field(default_factory=lambda: RecentlyUsed(0), repr=False, compare=False)

    def search(self, queries: list[str], top_n: int) -> list[list[Passage]]:
        """Return for each query, in order, up to `top_n` passages with their scores, best first.

        A query that occurs twice, or is remembered, is not searched for again. One without a word that can be
        searched for, an empty one for instance, finds nothing.

        Raises:
          ValueError: `top_n` is below 1, or a search service refuses the queries and says why.
          OSError: a search service cannot be reached.
        """
        if top_n < 1:
            raise ValueError(f"top_n must be at least 1, found {top_n}")
        found = {query: self.cache.get((query, top_n)) for query in queries}
        new = [query for query, passages in found.items() if passages is None and query.strip()]
        for start in range(0, len(new), self.batch_limit):
            batch = new[start : start + self.batch_limit]
            for query, passages in zip(batch, self.source.find(batch, top_n), strict=True):
                found[query] = passages
                if len(query) <= CACHED_LENGTH:
                    self.cache.put((query, top_n), passages)
        return [list(found[query] or ()) for query in queries]


@dataclass(frozen=True)
class TextEncoder:
    """A model that embeds texts. Questions and passages may be told apart, as E5 does by a prefix."""

    name: str  # of the vectors; what one encoder stored, another of the same name can search
    passages: Encoder
    queries: Encoder


def open_searcher(
    config: RetrievalConfig,
    directory: Path,
    embedded: Iterable[Passage],
    load_encoder: Callable[[str], TextEncoder] | None = None,
) -> Searcher:
    """Open the service or the index that `config` names; where it names none, build an index in `directory`.

    Args:
      directory: where an index of our own lives, for instance `<run>/index`; what is there is opened, not built again.
      embedded: the passages of the embedded world; read only where `config` names neither an index nor a corpus.
      load_encoder: reads the folder that `config.encoder` names, if it names one.

    Raises:
      OSError, ValueError: one line that names the service, corpus or index that cannot serve, and why.
    """
    source = _remote(config) if config.url else _local(config, directory, embedded, load_encoder)
    return Searcher(source, config.batch_limit, RecentlyUsed(config.cached_queries))


def _remote(config: RetrievalConfig) -> Source:
    if config.corpus or config.index:
        raise ValueError("retrieval.url names a service with a corpus of its own: leave out retrieval.corpus and index")
    services = [SearchService(url, config.timeout, config.attempts) for url in config.url]
    scales = [service.check().get("scale") for service in services]
    for service, scale in zip(services[1:], scales[1:], strict=True):
        if not scale or scale != scales[0]:
            raise ValueError(
                f"the scores of {services[0].url} ({scales[0]}) and {service.url} ({scale}) cannot be compared: serve "
                "the parts of a corpus with retrieval.method dense and one encoder folder"
            )
    return services[0] if len(services) == 1 else ShardedSource(tuple(services))


def _local(
    config: RetrievalConfig,
    directory: Path,
    embedded: Iterable[Passage],
    load_encoder: Callable[[str], TextEncoder] | None,
) -> LocalSource:
    if config.method != "bm25" and config.kind == "scann":
        approximate.check_installed()
    corpus = read_corpus(config.corpus) if config.corpus else None
    if corpus is None and not config.index:
        corpus = corpus_of(embedded)
    legs: list[Ranker] = []
    if config.method != "bm25":
        dense, stored = _dense(config, corpus, directory, load_encoder)
        corpus, scale = stored.corpus, f"dense/{stored.manifest['config']['encoder']}"
        legs.append(dense)
    if config.method != "dense":
        corpus = corpus or corpus_in(Path(config.index))
        legs.append(open_bm25(corpus, _words_folder(config, directory, BM25)))
    if config.method != "dense" or config.encoder == HASHING:
        # Words are weighed by how rare they are in this corpus.
        scale = f"{config.method}/{corpus.checksum}"
    return LocalSource(corpus, _hybrid(config, corpus, directory, legs) if len(legs) > 1 else legs[0], scale)


def _hybrid(config: RetrievalConfig, corpus: Corpus, directory: Path, legs: list[Ranker]) -> HybridRanker:
    """Vectors and words, joined by titles: a question names what it is about, and a passage what it leads to."""
    titles = open_bm25(corpus, _words_folder(config, directory, f"{BM25}/{TITLES}"), "title")
    names = open_names(corpus, _words_folder(config, directory, f"{BM25}/{NAMES}"))
    named = lambda row: names.named(corpus.contents[row])  # noqa: E731
    return HybridRanker((*legs, titles), WEIGHTS, named=named, named_weight=NAMED_WEIGHT)


def _words_folder(config: RetrievalConfig, directory: Path, name: str) -> Path:
    """Beside the vectors of the index that the config names, if it is there, or else in a folder of our own."""
    beside = Path(config.index, name)
    return beside if config.index and beside.exists() else directory / name


def _dense(
    config: RetrievalConfig,
    corpus: Corpus | None,
    directory: Path,
    load_encoder: Callable[[str], TextEncoder] | None,
) -> tuple[DenseRanker, StoredIndex]:
    """Open the vectors, or make them."""
    model = None
    if config.encoder != HASHING:
        if load_encoder is None:
            raise ValueError(f"retrieval.encoder {config.encoder!r} is unknown here: set it to {HASHING}")
        model = load_encoder(config.encoder)
    if not config.index:
        with _words_aside(directory):
            if not directory.exists():
                _build(config, corpus, directory, model)
    name = model.name if model else hashing_name(config.encoder_size)
    checksum = corpus.checksum if corpus else ""
    stored = open_index(Path(config.index or directory), encoder=name, kind=config.kind, checksum=checksum)
    if model:
        return DenseRanker(model.queries, stored.index), stored
    hashing = HashingEncoder(np.asarray(stored.encoder_state["idf"]), config.encoder_size)
    return DenseRanker(hashing, stored.index), stored


@contextlib.contextmanager
def _words_aside(directory: Path) -> Iterator[None]:
    """A folder that holds the words alone makes room for one with vectors, and gets them back."""
    words, aside = directory / BM25, directory.with_name(f".{directory.name}.{BM25}")
    if directory.exists() and list(directory.iterdir()) == [words]:
        words.rename(aside)
        directory.rmdir()
    yield
    if aside.exists():
        aside.rename(words)


def _build(config: RetrievalConfig, corpus: Corpus, directory: Path, model: TextEncoder | None) -> None:
    if model is None:
        hashing = fit_hashing((corpus.contents[row] for row in range(len(corpus))), config.encoder_size)
        name, encode, queries, state = hashing.name, hashing, hashing, {"idf": hashing.idf_F}
    else:
        name, encode, queries, state = model.name, model.passages, model.queries, {}
    settings = IndexConfig(name, config.kind, config.embedding_dtype, config.recall, config.batch_limit)
    build(corpus, encode, directory, settings, encoder_state=state, queries=queries)
