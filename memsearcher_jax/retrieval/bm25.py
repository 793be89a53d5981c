"""BM25 by the package bm25s (Lù, "BM25S", 2024), in a folder of its own.

English stop words and the last letter of contractions ("it's", "don't") are removed, and nothing is stemmed. The
contribution of a word to the score of a passage is computed when the index is built; a search only adds.

`bm25s` is imported where it is used, so that reading a config and printing `--help` do not need it. It imports JAX if
that is installed, which initialises the accelerator: set JAX_PLATFORMS=cpu in a process that must not use it.
"""

from __future__ import annotations

import errno
import logging
import re
import tempfile
from array import array
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from memsearcher_jax import analyzer
from memsearcher_jax.retrieval.builder.build_dir import explain_damage, explain_disk_full, read_manifest, write_manifest
from memsearcher_jax.retrieval.corpus import Corpus
from memsearcher_jax.retrieval.ranking import Ranking, top_k

if TYPE_CHECKING:
    import bm25s

Field = Literal["passage", "title"]
BM25_FORMAT = 5 + analyzer.VERSION  # of the folder; incremented when older readers would misread it
BM25 = "bm25"  # folder of the index of words, in that of the index
TITLES = "bm25/titles"  # and of the index of the words of titles
CONTRACTED = re.compile(r"['’](?<=\w['’])[stdm]\b", re.IGNORECASE)


@dataclass(frozen=True)
class Bm25Retriever:
    """A `Retriever`. A passage without a word of the query is not in its ranking."""

    model: bm25s.BM25

    def search(self, queries: list[str], top_n: int) -> list[Ranking]:
        return [self._search(_terms(query), top_n) for query in queries]

    def _search(self, words: list[str], top_n: int) -> Ranking:
        score_R = self.model.get_scores_from_ids(self.model.get_tokens_ids(words))
        rows = np.flatnonzero(score_R)  # a shared word adds more than 0
        return top_k(rows, score_R[rows], top_n)


def open_bm25(corpus: Corpus, directory: Path, field: Field = "passage") -> Bm25Retriever:
    """Open the folder, and build it first if it does not exist; that needs about 30 bytes per word of the corpus.

    Raises ValueError, in one line, for a folder of another corpus or a damaged one, OSError for a full disk.
    """
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # importing it sets DEBUG
    if not directory.exists():
        _build(corpus, directory, field)
    with explain_damage(directory):
        manifest = read_manifest(directory, BM25_FORMAT)
        if manifest["field"] != field:
            raise ValueError(f"a BM25 index of each {manifest['field']}, not of each {field}")
        if manifest["checksum"] == corpus.checksum:
            return Bm25Retriever(bm25s.BM25.load(directory, mmap=True))
    raise ValueError(f"{directory}: was built from another corpus (checksum differs); delete it to rebuild it")


def _build(corpus: Corpus, directory: Path, field: Field) -> None:
    """Write the folder under a temporary name first."""
    import bm25s
    from bm25s.tokenization import Tokenized

    vocabulary: dict[str, int] = {}
    word_ids: Any = []  # arrays of 4 bytes a word: lists of integers need several times that
    for passage in corpus:
        text = passage.contents if field == "passage" else passage.title
        ids = [vocabulary.setdefault(word, len(vocabulary)) for word in _terms(text)]
        word_ids.append(array("i", ids))
    if not vocabulary and field == "passage":
        raise ValueError("no passage of the corpus contains a word: set retrieval.method to dense")
    if not vocabulary:  # passages without titles: bm25s needs a word, and this one is in no query
        vocabulary = {"": 0}
        word_ids = [array("i", [0]) for _ in range(len(corpus))]
    model = bm25s.BM25(backend="numpy")  # with numba, the first search would wait for compilation
    model.index(Tokenized(word_ids, vocabulary), show_progress=False)
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = tempfile.TemporaryDirectory(prefix=f".{directory.name}.", suffix=".partial", dir=directory.parent)
    with explain_disk_full(directory), temporary as folder:
        staging = Path(folder, "bm25")
        model.save(staging, show_progress=False)
        try:
            bm25s.BM25.load(staging, mmap=True)
        except ValueError as error:  # bm25s saves with NumPy, which can miss a full disk
            raise OSError(errno.ENOSPC, str(error)) from error
        write_manifest(staging, {"format": BM25_FORMAT, "field": field, "checksum": corpus.checksum})
        if not directory.exists():  # another process may have built it meanwhile
            staging.rename(directory)


@cache
def _stop_words() -> frozenset[str]:
    from bm25s.stopwords import STOPWORDS_EN

    return frozenset(STOPWORDS_EN)


def _terms(text: str) -> list[str]:
    stop_words = _stop_words()
    return [word for word in analyzer.words(CONTRACTED.sub("", text)) if word not in stop_words]
