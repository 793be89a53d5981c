"""BM25 over the words of a corpus, by the package bm25s (Lù, "BM25S", 2024), in a folder of its own.

English stop words are left out and nothing is stemmed. What a word adds to the score of a passage is computed when the
index is built; a search only adds up.

`bm25s` is imported where it is used: a config is read, and `--help` printed, without it. It imports JAX where that is
installed, which takes the accelerator: a process that must leave it to others sets JAX_PLATFORMS=cpu first.
"""

from __future__ import annotations

import errno
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from memsearcher_jax.retrieval.corpus import Corpus
from memsearcher_jax.retrieval.index import MANIFEST
from memsearcher_jax.retrieval.ranking import Ranking, best, padded
from memsearcher_jax.retrieval.workplace import whole_folder, write_json

FORMAT = 2  # of the folder; raised when an older reader would misread a newer one
STOP_WORDS = "en"  # bm25s's name of its English list
Field = Literal["contents", "title"]
NAMES: dict[Field, str] = {"contents": "passage", "title": "title"}


@dataclass(frozen=True)
class Bm25Ranker:
    """A `Ranker`. A passage that shares no word with the query is not in its ranking."""

    model: Any  # bm25s.BM25

    def rank(self, queries: list[str], top_n: int) -> Ranking:
        import bm25s

        words_of = bm25s.tokenize(queries, stopwords=STOP_WORDS, return_ids=False, show_progress=False)
        return padded([self._rank(self.model.get_tokens_ids(words), top_n) for words in words_of])

    def _rank(self, words: list[int], top_n: int) -> Ranking:
        score_R = self.model.get_scores_from_ids(words)
        rows = np.flatnonzero(score_R)  # a word that is shared adds more than 0
        return best(rows, score_R[rows], top_n)


def open_bm25(corpus: Corpus, directory: Path, field: Field = "contents") -> Bm25Ranker:
    """Open the folder; build it first if it is not there.

    Raises:
      ValueError: one line that says why the folder cannot serve this corpus, and the way out.
    """
    if not directory.exists():
        build(corpus, directory, field)
    return _open(corpus, directory, field)


def build(corpus: Corpus, directory: Path, field: Field = "contents") -> None:
    """Write the folder, beside its place and then renamed. Memory: some 30 bytes for each word of a passage."""
    import bm25s

    # Pure NumPy on purpose: numba, where it is installed, would compile on the first search.
    model = bm25s.BM25(backend="numpy")
    words = _words_of(_text(corpus, row, field) for row in range(len(corpus)))
    if not words.vocab:
        raise ValueError(f"no {NAMES[field]} of the corpus holds a word: set retrieval.method to dense")
    model.index(words, show_progress=False)
    with whole_folder(directory) as beside:
        model.save(beside, show_progress=False)
        try:
            bm25s.BM25.load(beside, mmap=True)
        except ValueError as error:  # it saves with NumPy, see `save_array`
            raise OSError(errno.ENOSPC, str(error)) from error
        manifest = {"format": FORMAT, "field": field, "checksum": corpus.checksum, "passages": len(corpus)}
        write_json(beside / MANIFEST, manifest)


def _text(corpus: Corpus, row: int, field: Field) -> str:
    return corpus.contents[row] if field == "contents" else corpus.passage(row, 0.0).title


def _open(corpus: Corpus, directory: Path, field: Field) -> Bm25Ranker:
    import bm25s

    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, this version reads {FORMAT}")
        if manifest["field"] != field:
            raise ValueError(f"its words are those of each {manifest['field']}, not of each {field}")
        model = bm25s.BM25.load(directory, mmap=True)
        rows = model.scores["num_docs"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{directory}: is no BM25 index that can be read ({error}); delete it to build anew"
        ) from error
    if manifest["checksum"] != corpus.checksum or rows != len(corpus):
        raise ValueError(f"{directory}: was built from another corpus (checksum differs); delete it to build anew")
    return Bm25Ranker(model)


@dataclass(frozen=True)
class _Words:
    """The words of every passage as numbers, in the shape that bm25s indexes: 4 bytes a word."""

    numbers: array
    ends: array
    vocab: Mapping[str, int]

    @property
    def ids(self) -> _Words:
        return self

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for end in self.ends:
            yield self.numbers[start:end].tolist()
            start = end


def _words_of(texts: Iterable[str]) -> _Words:
    from bm25s.tokenization import Tokenizer

    tokenizer = Tokenizer(stopwords=STOP_WORDS)
    numbers, ends = array("i"), array("q")
    for words in tokenizer.streaming_tokenize(texts, allow_empty=False):
        numbers.extend(words)
        ends.append(len(numbers))
    return _Words(numbers, ends, tokenizer.get_vocab_dict())
