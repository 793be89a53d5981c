"""Search in this process: a corpus with the indexes of one retrieval method."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from memsearcher_jax.canonical import canonical
from memsearcher_jax.retrieval.bm25 import BM25, TITLES, Bm25Retriever, Field, open_bm25
from memsearcher_jax.retrieval.config import MAX_TOP_N, RetrievalConfig
from memsearcher_jax.retrieval.corpus import Corpus
from memsearcher_jax.retrieval.fusion import DenseRetriever, HybridRetriever, Retriever
from memsearcher_jax.retrieval.hashing_encoder import HASHING_NAME, HashingEncoder, TextEncoder
from memsearcher_jax.retrieval.index import open_index, open_index_corpus
from memsearcher_jax.types import Passage

WEIGHTS = (1.0, 1.0, 0.5)  # of vectors, BM25 and BM25 of titles in the hybrid ranking
LINKS = 6  # passages to which a passage links, at most
LINK_WORDS = 128  # words at the beginning of a passage that can link


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
        # On one line: the first of several is the title of a passage.
        plain_queries = [" ".join(canonical(query).split()) for query in queries]
        rankings = self.retriever.search(plain_queries, top_n)
        return [list(map(self.corpus.passage, ids_N.tolist(), scores_N.tolist())) for ids_N, scores_N in rankings]


def open_source(config: RetrievalConfig, directory: Path, model: TextEncoder | None = None) -> LocalSource:
    """The search of the index that `config` names, in this process; `directory` gets the index of words that it lacks.

    `model` is the encoder, unless it is the hashing encoder. Raises as `open_searcher`.
    """

    def words(name: str, field: Field) -> Bm25Retriever:
        existing = Path(config.index, name)  # which is read only: a folder of the user is not changed
        return open_bm25(corpus, existing if existing.exists() else directory / name, field)

    if config.method == "bm25":
        corpus = open_index_corpus(Path(config.index))
        return LocalSource(corpus, words(BM25, "passage"))
    stored = open_index(
        Path(config.index),
        encoder=model.name if model else HASHING_NAME,
        index_type=config.index_type,
        max_passage_tokens=config.max_passage_tokens if model else 0,
    )
    corpus = stored.corpus
    queries = model.queries if model else HashingEncoder(stored.encoder_state["idf"])
    dense = DenseRetriever(queries, stored.index)
    if config.method == "dense":
        return LocalSource(corpus, dense)
    passages = words(BM25, "passage")  # first, because the folder of titles is in its folder
    titles = words(TITLES, "title")
    retrievers = (dense, passages, titles)
    return LocalSource(corpus, HybridRetriever(retrievers, WEIGHTS, linked_rows=partial(linked_rows, corpus, titles)))


def linked_rows(corpus: Corpus, titles: Retriever, row: int) -> np.ndarray:
    """The first passages of the pages whose titles share the rarest words with the beginning of a passage's text."""
    text = corpus.passage(row).contents.partition("\n")[2]
    ((found_N, _),) = titles.search([" ".join(text.split()[:LINK_WORDS])], MAX_TOP_N)
    first: dict[str, int] = {}
    for found in found_N.tolist():
        first.setdefault(corpus.passage(found).title, found)
    return np.array(list(first.values())[:LINKS], np.int64)
