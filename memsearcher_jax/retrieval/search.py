"""From queries to passages: the interface to search for all other packages."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from memsearcher_jax.retrieval import scann_index
from memsearcher_jax.retrieval.builder.build_dir import MANIFEST
from memsearcher_jax.retrieval.builder.index_builder import build_index
from memsearcher_jax.retrieval.config import HASHING, MAX_BATCH, RetrievalConfig
from memsearcher_jax.retrieval.corpus import corpus_checksum
from memsearcher_jax.retrieval.hashing_encoder import TextEncoder
from memsearcher_jax.retrieval.index import read_index_manifest
from memsearcher_jax.retrieval.local_source import Source, open_source
from memsearcher_jax.retrieval.search_process import SearchProcess
from memsearcher_jax.retrieval.server.client import SearchClient
from memsearcher_jax.types import Passage

CACHED_QUERIES = 20_000  # with more, the cache is emptied


@dataclass(frozen=True)
class Searcher:
    source: Source
    cache: dict[tuple[str, int], list[Passage]] = field(default_factory=dict, repr=False)

    def search(self, queries: list[str], top_n: int) -> list[list[Passage]]:
        """Return up to `top_n` passages with their scores for each query, in order, best first.

        A query that occurs twice, or is in the cache, is not searched again. A query without a word has no results.

        Raises ValueError for a `top_n` below 1, or queries that a search service rejects, OSError if it is unavailable.
        """
        if top_n < 1:
            raise ValueError(f"top_n must be at least 1, found {top_n}")
        if len(self.cache) > CACHED_QUERIES:
            self.cache.clear()
        results = {query: self.cache.get((query, top_n)) for query in queries}
        new = [query for query, passages in results.items() if passages is None and query.strip()]
        for start in range(0, len(new), MAX_BATCH):
            batch = new[start : start + MAX_BATCH]
            for query, passages in zip(batch, self.source.search(batch, top_n), strict=True):
                results[query] = self.cache[query, top_n] = passages
        return [list(results[query] or ()) for query in queries]


def open_searcher(
    config: RetrievalConfig,
    directory: Path,
    passages: Collection[Passage],
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

    Raises OSError or ValueError, in one line with the service, corpus or index that cannot be used, and the reason.
    """
    source: Source
    if config.url:
        if config.corpus or config.index:
            raise ValueError("retrieval.url is a service with its own corpus: leave out retrieval.corpus and index")
        source = SearchClient(config.url, config.timeout)
        source.check(max_outage)
    else:
        model = None
        if config.method != "bm25" and config.encoder != HASHING:
            if load_encoder is None:
                raise ValueError(f"retrieval.encoder {config.encoder!r} is unknown here: set it to {HASHING}")
            model = load_encoder(config)
        index = replace(config, corpus="", index=str(_built_index(config, directory, passages, model)))
        if config.corpus or config.index:
            source = SearchProcess(index, directory, model, search_timeout)
        else:
            source = open_source(index, directory, model)
    return Searcher(source)


def _built_index(
    config: RetrievalConfig, directory: Path, passages: Collection[Passage], model: TextEncoder | None
) -> Path:
    """The configured index, or else that in `directory`, which is built if it does not exist.

    Raises ValueError if it holds other passages than the configured corpus or the encyclopedia.
    """
    if config.method != "bm25" and config.index_type == "scann":
        scann_index.check_installed()
    folder = Path(config.index or directory)
    corpus = Path(config.corpus) if config.corpus else passages
    if not config.index and not (folder / MANIFEST).exists():
        build_index(config, corpus, folder, model)
    elif (config.corpus or not config.index) and read_index_manifest(folder)["checksum"] != corpus_checksum(corpus):
        raise ValueError(f"{folder}: was built from another corpus (checksum differs); delete it to rebuild it")
    return folder
