"""An index that is built again over a changed corpus: which passages it has already, and their vectors."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from memsearcher_jax.retrieval.bm25 import BM25, TITLES
from memsearcher_jax.retrieval.builder import build_dir
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.corpus import Corpus
from memsearcher_jax.retrieval.hashing_encoder import HASHING_NAME, TextEncoder
from memsearcher_jax.retrieval.index import EMBEDDINGS, STATE, open_index_corpus, read_index_manifest
from memsearcher_jax.retrieval.vector_files import EmbeddingShards

MISSING = -1


@dataclass(frozen=True)
class Kept:
    """How many passages of a corpus an earlier index has already."""

    passages: int  # of the new index whose text the earlier one has
    new: int
    removed: int  # of the earlier index that are in the new one no longer
    vectors: int  # that were copied instead of computed


@dataclass(frozen=True)
class EarlierIndex:
    """The index in a folder that the new one replaces, and the corpus of the new one."""

    directory: Path
    manifest: Mapping[str, Any]
    corpus: Corpus  # of the new index

    @cached_property
    def rows(self) -> np.ndarray:
        """Int64 [R]: for each passage of the new corpus the row of one with the same text, or MISSING."""
        earlier = open_index_corpus(self.directory)
        earlier_hash_E = _hashes(earlier)
        order_E = np.argsort(earlier_hash_E, kind="stable")
        hash_R = _hashes(self.corpus)
        place_R = np.searchsorted(earlier_hash_E, hash_R, sorter=order_E)
        rows = np.full(len(self.corpus), MISSING, np.int64)
        for row, place in enumerate(place_R.tolist()):
            if place == len(order_E):
                continue
            candidate = int(order_E[place])
            # Two texts may have the same hash.
            if earlier_hash_E[candidate] == hash_R[row] and earlier.contents[candidate] == self.corpus.contents[row]:
                rows[row] = candidate
        return rows

    def is_current(self, config: RetrievalConfig) -> bool:
        """Whether it is the index of these passages already."""
        words = {"dense": (), "bm25": (BM25,), "hybrid": (BM25, TITLES)}[config.method]
        has_words = all((self.directory / name).exists() for name in words)
        has_recall = config.method == "bm25" or self.manifest["recall"] >= config.target_recall
        return self.manifest["checksum"] == self.corpus.checksum and has_words and has_recall

    def kept(self, vectors: bool) -> Kept:
        passages = int(np.count_nonzero(self.rows != MISSING))
        remaining = len(np.unique(self.rows[self.rows != MISSING]))
        removed = self.manifest["passages"] - remaining
        return Kept(passages, len(self.corpus) - passages, removed, passages if vectors else 0)

    def vectors(self, wanted: Mapping[str, Any], state: Mapping[str, np.ndarray]) -> EmbeddingShards | None:
        """The stored vectors if they are those that `wanted` describes, by an encoder of this fitted state."""
        vectors = self.manifest["vectors"]
        if dict(vectors) != dict(wanted):
            return None
        file = self.directory / STATE
        stored = dict(np.load(file)) if file.exists() else {}
        if stored.keys() != state.keys() or not all(np.array_equal(stored[name], state[name]) for name in state):
            return None
        rows = self.manifest["passages"]
        return EmbeddingShards(self.directory / EMBEDDINGS, rows, vectors["size"], vectors["dtype"])


def open_earlier(
    directory: Path, corpus: Corpus, config: RetrievalConfig, model: TextEncoder | None
) -> EarlierIndex | None:
    """The index in `directory`, which one over `corpus` with these settings will replace; None if there is none.

    Raises FileExistsError if it is another index: of other settings, or of other passages only. Raises ValueError if it
    cannot be read.
    """
    if not (directory / build_dir.MANIFEST).is_file():
        return None
    manifest = read_index_manifest(directory)
    vectors = manifest["vectors"] or {}
    built = {name: vectors.get(name) for name in ("encoder", "dtype", "max_passage_tokens")}
    built["index_type"] = manifest.get("index_type")
    wanted: dict[str, Any] = dict.fromkeys(built)
    if config.method != "bm25":
        wanted = {
            "encoder": model.name if model else HASHING_NAME,
            "dtype": config.embedding_dtype,
            "max_passage_tokens": config.max_passage_tokens,
            "index_type": config.index_type,
        }
    for name, value in wanted.items():
        if built[name] != value:
            reason = f"already exists, built with {name} {built[name]!r}, not {value!r}"
            raise FileExistsError(f"{directory}: {reason}; choose another folder, or delete it to rebuild it")
    earlier = EarlierIndex(directory, manifest, corpus)
    if (earlier.rows == MISSING).all():
        reason = "already exists, of other passages"
        raise FileExistsError(f"{directory}: {reason}; choose another folder, or delete it to rebuild it")
    return earlier


def replaced_dir(directory: Path) -> Path:
    """Where an index is while the one that replaces it gets its name."""
    return directory.with_name(f".{directory.name}.replaced")


def recover(directory: Path) -> None:
    """Undo a replacement that was interrupted between its two renames, and remove what a complete one left."""
    replaced = replaced_dir(directory)
    if replaced.exists() and not directory.exists():
        replaced.rename(directory)
    elif replaced.exists():
        shutil.rmtree(replaced)


def replace(directory: Path, staging: Path) -> None:
    """Put the folder `staging` in the place of the index. Processes that search it keep the files that they opened."""
    replaced = replaced_dir(directory)
    directory.rename(replaced)
    staging.rename(directory)
    shutil.rmtree(replaced)


def _hashes(corpus: Corpus) -> np.ndarray:
    """A uint64 of each passage's text."""
    return np.fromiter(map(_hash, _texts(corpus)), np.uint64, len(corpus))


def _texts(corpus: Corpus) -> Iterable[bytes]:
    for text in corpus.contents:
        yield text.as_py()


def _hash(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
