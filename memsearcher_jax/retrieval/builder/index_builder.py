"""Builds an index folder in resumable steps: an interrupted build continues where it stopped.

During the build, the folder for `wiki/` is `.wiki.building/` next to it:

build.json     what is built; another corpus, encoder or vector type is rejected
passages.arrow  the passages; complete when corpus.json exists
embeddings/000000.npy ...  each complete or missing; several processes can build different ones
scann/         the tree
bm25/          the index of words, and in it that of titles
manifest.json  written last; then the folder is renamed

An index that is there already is replaced. Vectors of passages whose text it has are copied.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from memsearcher_jax.jsonl import numbered_lines
from memsearcher_jax.retrieval import scann_index
from memsearcher_jax.retrieval.bm25 import BM25, TITLES, open_bm25
from memsearcher_jax.retrieval.builder import build_dir
from memsearcher_jax.retrieval.builder.earlier_index import MISSING, Kept, open_earlier, recover, replace
from memsearcher_jax.retrieval.config import MAX_BATCH, RetrievalConfig
from memsearcher_jax.retrieval.corpus import Corpus, Source, corpus_checksum, open_corpus, source_name, store_corpus
from memsearcher_jax.retrieval.hashing_encoder import HASHING_NAME, TextEncoder, fit_hashing
from memsearcher_jax.retrieval.index import EMBEDDINGS, FORMAT, STATE, TREE, ExactIndex
from memsearcher_jax.retrieval.scann_index import ScannIndex
from memsearcher_jax.retrieval.vector_files import EmbeddingShards

BUILD = "build.json"
CORPUS = "corpus.json"
FLOATS = "float32.bin"
TEMPORARY = (BUILD, CORPUS, FLOATS)
PREFETCH = 2  # batches in progress: the host tokenises one while the devices compute the other
PROBES = 512  # texts used as queries to tune a tree, and as many others to verify its recall
AIM_SHARES = (0, 0.25, 0.5, 0.75, 1)  # a tree is tuned this far from the target recall to 1 until it verifies
PROBE_WORDS = 12
MIN_COSINE = 0.9  # median cosine of precomputed vectors and the encoder's, below which the encoders differ
COMPARED_ROWS = 32  # passages whose vectors are compared
POLL_SECONDS = 10.0  # interval of checks for shards of other processes

ProgressFn = Callable[[str, int, int], None]
"""Receives the step of a build, the items done and the total, which is 0 if unknown."""


@dataclass(frozen=True)
class BuildShard:
    """The share of a process: the embedding shards whose number is `index` modulo `count`."""

    index: int = 0
    count: int = 1


def prepare_corpus(source: Source, directory: Path, on_progress: ProgressFn = lambda step, done, total: None) -> Corpus:
    """Write the passages of `source` into the staging folder of `directory`, unless they are there already.

    Raises as `store_corpus`, and ValueError for passages that changed since the build started.
    """
    if directory.is_mount() or not (directory / build_dir.MANIFEST).is_file():
        build_dir.check_absent(directory)
    if isinstance(source, Path):
        for _ in numbered_lines(source):  # raises for a missing file or a folder, before anything is written
            break
    staging = build_dir.staging_dir(directory)
    with build_dir.explain_disk_full(staging), build_dir.locked(staging, "corpus", wait=True):
        if (staging / CORPUS).exists():
            checksum = json.loads((staging / CORPUS).read_text())["checksum"]
            if checksum != corpus_checksum(source):
                name = source_name(source)
                raise ValueError(f"{name} changed since the build of {staging} started: delete that folder to restart")
            return open_corpus(staging, checksum)
        try:
            corpus = store_corpus(source, staging, lambda rows: on_progress("reading passages", rows, 0))
        except ValueError:
            shutil.rmtree(staging)  # it contains nothing of an invalid corpus that a later build could use
            raise
        build_dir.write_json(staging / CORPUS, {"checksum": corpus.checksum})
        return corpus


def build_index(
    config: RetrievalConfig,
    source: Source,
    directory: Path,
    model: TextEncoder | None = None,
    *,
    precomputed: np.ndarray | None = None,
    shard: BuildShard = BuildShard(),
    on_progress: ProgressFn = lambda step, done, total: None,
) -> Kept | None:
    """Write a folder that `open_index` reads, or continue an interrupted build; without vectors if `config` needs none.

    An index in `directory` that has some of the passages is replaced, and their vectors are copied; those of the
    hashing encoder depend on the whole corpus and are computed. One of the same passages is kept. The indexes of words
    that `config.method` needs are part of the folder.

    Args:
      model: embeds the texts, unless the encoder is the hashing encoder, which is fitted to the passages.
      precomputed: vectors [R, D] of any length to use instead of embedding, in the order of the passages.
      shard: the share of this process. Shard 0 waits for the others and then builds the tree; the others return when
        their embeddings are written.

    Returns what an earlier index had; None without one, and for other shards than 0.

    Raises:
      FileExistsError: `directory` holds something else than an index of these settings with some of the passages; it is
        not changed.
      ValueError: the passages are invalid or changed; the build was started with other settings; the encoder returned a
        wrong shape or no finite numbers; the precomputed vectors are of another one; the recall is not reachable.
      OSError: the disk is full. Finished steps are kept, and the next call continues.
    """
    directory = directory.resolve()  # "." has no name, and a link cannot be replaced by a folder
    recover(directory)
    corpus = prepare_corpus(source, directory, on_progress)
    staging = build_dir.staging_dir(directory)
    build = None
    with build_dir.explain_disk_full(staging), build_dir.locked(staging, f"shard{shard.index}"):
        vectors: dict[str, Any] = {"vectors": None}
        try:
            earlier = open_earlier(directory, corpus, config, model)
        except (FileExistsError, ValueError):
            shutil.rmtree(staging)  # it contains nothing that a build of another folder could use
            raise
        if earlier and earlier.is_current(config):
            shutil.rmtree(staging)
            return earlier.kept(vectors=config.method != "bm25")
        if config.method != "bm25":
            state: dict[str, np.ndarray] = {}
            if model is None:
                hashing = fit_hashing(passage.contents for passage in corpus)
                model = TextEncoder(HASHING_NAME, hashing, hashing)
                state = {"idf": hashing.idf_F}
            build = _VectorBuild(staging, corpus, config, model, precomputed, on_progress)
            vectors = build.start()
            if earlier and precomputed is None:
                earlier_vectors = earlier.vectors(vectors["vectors"], state)
                build = dataclasses.replace(build, earlier_rows=earlier.rows, earlier_vectors=earlier_vectors)
            build.write_shards(shard)
            if shard.index == 0:
                build.wait_for_shards()
                if state:
                    np.savez(staging / STATE, allow_pickle=False, **state)
                vectors |= build.tree()
        elif (staging / BUILD).exists():
            raise ValueError(f"{staging} has vectors of another build: delete it, or omit retrieval.method bm25")
        if shard.index:
            return None
        _write_word_indexes(config, corpus, staging, on_progress)
        for partial in staging.rglob("*.partial"):  # of processes that were killed
            partial.unlink()
        manifest = {"format": FORMAT, "checksum": corpus.checksum, "passages": len(corpus), **vectors}
        build_dir.write_manifest(staging, manifest, omitted=TEMPORARY)
        for name in TEMPORARY:
            (staging / name).unlink(missing_ok=True)
        if earlier:
            replace(directory, staging)
            return earlier.kept(vectors=build is not None and build.earlier_vectors is not None)
        staging.rename(directory)  # which may exist, but is empty
    return None


def _write_word_indexes(config: RetrievalConfig, corpus: Corpus, staging: Path, on_progress: ProgressFn) -> None:
    """Those that a search by `config.method` opens; they are built only once."""
    if config.method == "dense":
        return
    on_progress("indexing words", 0, 0)
    open_bm25(corpus, staging / BM25, "passage")
    if config.method == "hybrid":
        open_bm25(corpus, staging / TITLES, "title")


@dataclass(frozen=True)
class _VectorBuild:
    """The steps of a build that make vectors, and a tree over them."""

    staging: Path
    corpus: Corpus
    config: RetrievalConfig
    model: TextEncoder
    precomputed: np.ndarray | None
    on_progress: ProgressFn
    earlier_rows: np.ndarray | None = None  # of each passage, in the vectors of an earlier index
    earlier_vectors: EmbeddingShards | None = None

    @cached_property
    def shards(self) -> EmbeddingShards:
        some_BD = self.model.passages(self.corpus.texts([0])) if self.precomputed is None else self.precomputed
        directory = self.staging / EMBEDDINGS
        return EmbeddingShards(directory, len(self.corpus), some_BD.shape[1], self.config.embedding_dtype)

    def start(self) -> dict[str, Any]:
        """Record which vectors are made, or check that they are the same; return their entries of the manifest."""
        embeddings = None if self.precomputed is None else self._checked(self.precomputed)
        vectors = {"encoder": self.model.name, "size": self.shards.size, "dtype": self.shards.dtype}
        vectors["max_passage_tokens"] = self.config.max_passage_tokens
        build = {"checksum": self.corpus.checksum, "embeddings": embeddings, **vectors}
        if (self.staging / BUILD).exists():
            stored = json.loads((self.staging / BUILD).read_text())
            for name, value in build.items():
                old = stored.get(name)
                if old != value:
                    reason = f"was started with {name} {old!r}, not {value!r}"
                    raise ValueError(f"{self.staging} {reason}: use the same, or delete that folder to restart")
        self.shards.directory.mkdir(exist_ok=True)
        build_dir.write_json(self.staging / BUILD, build)
        return {"vectors": vectors, "index_type": self.config.index_type}

    def _checked(self, precomputed: np.ndarray) -> str:
        """A hash of some of the vectors, which the encoder confirms."""
        rows = np.unique(np.linspace(0, len(self.corpus) - 1, COMPARED_ROWS).astype(int))
        encoded_BD = self.model.passages(self.corpus.texts(rows.tolist()))
        needed = (len(self.corpus), encoded_BD.shape[1])
        if precomputed.shape != needed:
            raise ValueError(f"the precomputed vectors are {precomputed.shape}, passages and encoder need {needed}")
        given_BD = _unit_vectors(precomputed[rows])
        finite_B = np.isfinite(given_BD).all(axis=1)  # vectors that are not finite are reported when they are copied
        cosine = float(np.median(np.sum(encoded_BD[finite_B] * given_BD[finite_B], axis=1)))
        if not cosine >= MIN_COSINE:
            reason = f"on {len(rows)} passages their median cosine with this encoder's is {cosine:.3f}"
            hint = "check the encoder, its prompts and the order of the corpus"
            raise ValueError(f"the precomputed vectors are from another encoder: {reason}; {hint}")
        return hashlib.sha256(given_BD.tobytes()).hexdigest()[:16]

    def write_shards(self, share: BuildShard) -> None:
        shards = self.shards
        own = range(share.index, shards.count, share.count)
        missing = [number for number in shards.missing() if number in own]
        total = sum(len(shards.row_range(number)) for number in own)
        done = total - sum(len(shards.row_range(number)) for number in missing)
        self.on_progress("embedding", done, total)
        with ThreadPoolExecutor(PREFETCH) as pool:
            for number in missing:
                rows = shards.row_range(number)
                batches = []
                parts = [rows[start : start + MAX_BATCH] for start in range(0, len(rows), MAX_BATCH)]
                for batch_BD in pool.map(self._embed, parts):
                    batches.append(batch_BD)
                    done += len(batch_BD)
                    self.on_progress("embedding", done, total)
                vectors_BD = np.concatenate(batches)
                finite_B = np.isfinite(vectors_BD).all(axis=1)
                if not finite_B.all():
                    passage = self.corpus.passage(rows[int(np.argmin(finite_B))])
                    raise ValueError(f'the embedding of passage "{passage.id}" is zero or not finite; check its source')
                shards.write(number, vectors_BD)

    def _embed(self, rows: range) -> np.ndarray:
        if self.precomputed is not None:
            return _unit_vectors(self.precomputed[rows.start : rows.stop])
        if self.earlier_rows is None or self.earlier_vectors is None:
            return self._encode(rows)
        vectors_BD = np.empty((len(rows), self.shards.size), np.float32)
        new_rows = list[int]()
        for row in rows:
            earlier_row = int(self.earlier_rows[row])
            if earlier_row == MISSING:
                new_rows.append(row)
            else:
                vectors_BD[row - rows.start] = self.earlier_vectors.row(earlier_row)
        if new_rows:
            vectors_BD[np.array(new_rows) - rows.start] = self._encode(new_rows)
        return vectors_BD

    def _encode(self, rows: Sequence[int]) -> np.ndarray:
        vectors_BD = self.model.passages(self.corpus.texts(rows))
        if vectors_BD.shape != (len(rows), self.shards.size):
            raise ValueError(f"the encoder returned shape {vectors_BD.shape} for {len(rows)} texts")
        return vectors_BD

    def wait_for_shards(self) -> None:
        while missing := self.shards.missing():
            count = self.shards.count
            self.on_progress("waiting for the shards of other processes", count - len(missing), count)
            time.sleep(POLL_SECONDS)

    def tree(self) -> dict[str, Any]:
        """The tree's entries of the manifest: its settings, and its recall on held-out probes and their number."""
        shards = self.shards
        config = self.config
        if config.index_type != "scann" or shards.rows < scann_index.MIN_TREE_ROWS:
            return {"tree": None, "recall": 1.0, "measured_on": 0}
        self.on_progress("building the tree", 0, 0)
        shutil.rmtree(self.staging / TREE, ignore_errors=True)
        with (self.staging / FLOATS).open("wb") as file:
            for shard in range(shards.count):
                file.write(shards.load(shard).astype(np.float32).data)
        # ScaNN keeps copies of the vectors in memory while it trains: they are mapped from one file.
        vectors_RD = np.memmap(self.staging / FLOATS, np.float32, mode="r", shape=(shards.rows, shards.size))
        tree = scann_index.build_tree(vectors_RD)
        self.on_progress("measuring recall", 0, 0)
        tuned, measured = self._tuned(tree, ExactIndex(vectors_RD))
        scann_index.save_tree(tuned, self.staging / TREE)
        return {"tree": {"leaves": tuned.leaves, "leaves_searched": tuned.leaves_searched}, **measured}

    def _tuned(self, tree: ScannIndex, exact_index: ExactIndex) -> tuple[ScannIndex, dict[str, float]]:
        """The tree tuned to the target recall, with its recall on probes that did not tune it, and their number."""
        # A question is much shorter than a passage, and a passage would find itself: use the last words of passages.
        rows = np.linspace(0, len(self.corpus) - 1, 2 * PROBES).astype(int)
        target = self.config.target_recall
        texts = [" ".join(text.split()[-PROBE_WORDS:]) for text in self.corpus.texts(rows.tolist())]
        probes_QD = self.model.queries(texts)
        probes_QD = probes_QD[probes_QD.any(axis=1)]
        exact = exact_index.search(probes_QD, scann_index.TOP)
        recall = 0.0
        for share in AIM_SHARES:
            tuned = scann_index.tune(tree, probes_QD[::2], exact[::2], target + share * (1 - target))
            # Recall is higher on the probes that tuned the tree than on the others.
            recall = scann_index.mean_recall(tuned.search(probes_QD[1::2], scann_index.TOP), exact[1::2])
            if recall >= target:
                return tuned, {"recall": recall, "measured_on": len(exact[1::2])}
        raise ValueError(f"recall on held-out probes is {recall:.3f}: lower retrieval.target_recall from {target}")


def _unit_vectors(vectors_BD: np.ndarray) -> np.ndarray:
    """The vectors with length 1, as the encoder's: of others the longest would win.

    Zeros, of which a file that was not filled to its end consists, become NaN.
    """
    with np.errstate(all="ignore"):
        vectors_BD = vectors_BD.astype(np.float32)
        return (vectors_BD / np.linalg.norm(vectors_BD.astype(np.float64), axis=1, keepdims=True)).astype(np.float32)
