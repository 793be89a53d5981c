"""Builds an index folder in steps, each of which is done or not done: a killed build goes on where it was.

While it is built, the folder for `wiki/` is `.wiki.building/` beside it:

begun.json     what is being built; another corpus, encoder or type of vectors is refused
ids.*  contents.*          the passages; corpus.json says that they are whole
embeddings/000000.npy ...  each whole or absent; several processes may each make a part of them
scann/         the tree; tree.json says that it is whole and how well it finds
manifest.json  written last; then the folder gets its name
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from memsearcher_jax.retrieval import approximate
from memsearcher_jax.retrieval.corpus import Corpus, corpus_checksum, open_corpus, save_corpus, store_corpus
from memsearcher_jax.retrieval.encode import Encoder
from memsearcher_jax.retrieval.index import (
    EMBEDDINGS,
    FORMAT,
    MANIFEST,
    STATE,
    TREE,
    ExactIndex,
    IndexConfig,
    shards_of,
)
from memsearcher_jax.retrieval.vectors import Rows, Shards
from memsearcher_jax.retrieval.workplace import (
    LOCK,
    disk_full_explained,
    locked,
    refuse_existing,
    working_folder,
    write_json,
)

BEGUN, CORPUS, MEASURED, FLOATS = "begun.json", "corpus.json", "tree.json", "float32.bin"
AHEAD = 2  # batches in the works: the host tokenises one while the devices compute the other
PROBES = 512  # texts that stand in for queries when a tree is tuned, and as many others when it is measured
PROBE_WORDS = 12
SAME_ENCODER = 0.9  # median cosine of published vectors and our own, below which they are not of one encoder
COMPARED = 32  # passages for that
WAIT_S = 10.0  # between two looks at what other processes have made


@dataclass(frozen=True)
class Part:
    """Which shards a process makes: those whose number leaves `number` when divided by `of`."""

    number: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.of:
            raise ValueError(f"part {self.number} of {self.of}: parts are numbered from 0 to {self.of - 1}")


class Report(Protocol):
    def __call__(self, step: str, done: int, total: int) -> None:
        """Hears how far a step is; `total` is 0 where nobody knows it yet."""


def silent(step: str, done: int, total: int) -> None:
    """A `Report` that nobody reads."""


def prepare_corpus(path: Path, directory: Path, report: Report = silent) -> Corpus:
    """The corpus in the file `path`, of any size, read into the working folder of `directory` unless it stands there.

    Raises FileNotFoundError or ValueError for a file that cannot serve, or that changed since the build was begun.
    """
    refuse_existing(directory)
    looks, working = _looks(path), working_folder(directory)
    with disk_full_explained(working), locked(working, "corpus", wait=True):
        if (working / CORPUS).exists():
            stored = json.loads((working / CORPUS).read_text())
            # A file that was only touched, or unpacked again, costs one pass over it.
            if stored["looks"] != looks and stored["checksum"] != corpus_checksum(path):
                raise ValueError(f"{path} changed since {working} was begun: delete that folder to begin anew")
            return open_corpus(working, stored["checksum"])
        try:
            corpus = store_corpus(path, working, lambda rows: report("reading passages", rows, 0))
        except ValueError:
            shutil.rmtree(working)  # nothing of a corpus that cannot be read is worth keeping
            raise
        write_json(working / CORPUS, {"checksum": corpus.checksum, "looks": looks})
        return corpus


def build(
    corpus: Corpus,
    encoder: Encoder,
    directory: Path,
    config: IndexConfig,
    encoder_state: Mapping[str, np.ndarray] | None = None,
    *,
    queries: Encoder | None = None,
    published: Rows | None = None,
    part: Part = Part(),
    report: Report = silent,
) -> None:
    """Embed `corpus` and write a folder that `open_index` reads, or go on with what an earlier call has begun.

    Args:
      encoder: embeds passages.
      encoder_state: whatever arrays the encoder was fitted with; they come back from `open_index`.
      queries: embeds queries, where that is another function; the tree is tuned with it.
      published: vectors that take the place of embedding, in the order of the corpus.
      part: the shards that this process makes. Part 0 waits for the others and then builds the tree; the others
        return when their shards are there.

    Raises:
      FileExistsError: `directory` exists; nothing in it is touched.
      ValueError: the folder was begun with something else; the encoder returned another shape, or numbers that are
        not finite (the passage is named); the published vectors are not this encoder's; the recall is out of reach.
      OSError: the disk is full. What is built stays, and the next call goes on with it.
    """
    refuse_existing(directory)
    working = working_folder(directory)
    with disk_full_explained(working), locked(working, f"part{part.number}"):
        source = _published(corpus, published, encoder) if published is not None else _embedder(corpus, encoder, config)
        size = source(0, 1).shape[1]
        shards = _begin(working, corpus, config, size, published is not None)
        _need_space(working, shards, config)
        _fill(shards, source, corpus, config, part, report)
        if part.number:
            return
        _wait_for_others(shards, report)
        if encoder_state:
            np.savez(working / STATE, **encoder_state)
        tree = _tree(working, shards, corpus, queries or encoder, config, report)
        manifest = {
            "format": FORMAT,
            "checksum": corpus.checksum,
            "passages": len(corpus),
            "dimensions": size,
            "config": asdict(config),
            **tree,
        }
        write_json(working / MANIFEST, manifest)
        for name in (BEGUN, CORPUS, MEASURED, FLOATS):
            (working / name).unlink(missing_ok=True)
        working.rename(directory)
        for lock in directory.glob(f"*{LOCK}"):
            lock.unlink()


def _begin(working: Path, corpus: Corpus, config: IndexConfig, size: int, published: bool) -> Shards:
    """Note what is being built, or check that it is what was begun; the corpus is there afterwards."""
    begun = {
        "checksum": corpus.checksum,
        "encoder": config.encoder,
        "dtype": config.dtype,
        "shard_rows": config.shard_rows,
        "dimensions": size,
        "published": published,
    }
    if (working / BEGUN).exists():
        stored = json.loads((working / BEGUN).read_text())
        for name, value in begun.items():
            if stored.get(name) != value:
                raise ValueError(
                    f"{working} was begun with {name} {stored.get(name)!r}, and this is {value!r}: give the same "
                    "settings, or delete that folder to begin anew"
                )
    if not (working / CORPUS).exists():
        save_corpus(corpus, working)
        write_json(working / CORPUS, {"checksum": corpus.checksum, "looks": None})
    (working / EMBEDDINGS).mkdir(exist_ok=True)
    write_json(working / BEGUN, begun)
    return shards_of(working, len(corpus), size, config)


def _embedder(corpus: Corpus, encoder: Encoder, config: IndexConfig) -> Callable[[int, int], np.ndarray]:
    def embed(start: int, stop: int) -> np.ndarray:
        texts = corpus.texts(start, stop)
        vectors_BD = encoder(texts)
        if vectors_BD.ndim != 2 or len(vectors_BD) != len(texts):
            raise ValueError(f"the encoder returned shape {vectors_BD.shape} for {len(texts)} texts")
        return vectors_BD

    return embed


def _published(corpus: Corpus, published: Rows, encoder: Encoder) -> Callable[[int, int], np.ndarray]:
    """Reads what somebody else made, once it is clear that it belongs to this corpus and this encoder."""
    if len(published) != len(corpus):
        raise ValueError(f"there are {len(published)} published vectors, and {len(corpus)} passages")
    rows = np.unique(np.linspace(0, len(corpus) - 1, COMPARED).astype(int))
    ours_BD = encoder([corpus.contents[row] for row in rows])
    theirs_BD = np.concatenate([np.asarray(published[row : row + 1], np.float32) for row in rows])
    if ours_BD.shape != theirs_BD.shape:
        raise ValueError(f"the published vectors have {theirs_BD.shape[1]} dimensions, the encoder {ours_BD.shape[1]}")
    finite_B = np.isfinite(theirs_BD).all(axis=1)  # the others are named when they are copied
    ours_BD, theirs_BD = ours_BD[finite_B], theirs_BD[finite_B]
    norms_B = np.linalg.norm(ours_BD, axis=1) * np.linalg.norm(theirs_BD, axis=1)
    cosine = float(np.median(np.sum(ours_BD * theirs_BD, axis=1) / np.maximum(norms_B, 1e-12)))
    if not cosine >= SAME_ENCODER:
        raise ValueError(
            f"the published vectors are not this encoder's: on {len(rows)} passages their median cosine with its own "
            f"is {cosine:.3f}; check the encoder, its prompts and the order of the corpus"
        )
    return lambda start, stop: np.asarray(published[start:stop], np.float32)


def _fill(
    shards: Shards,
    source: Callable[[int, int], np.ndarray],
    corpus: Corpus,
    config: IndexConfig,
    part: Part,
    report: Report,
) -> None:
    """Make the shards of this part that are missing."""
    ours = [shard for shard in range(shards.count) if shard % part.of == part.number]
    sizes = {shard: shards.span(shard)[1] - shards.span(shard)[0] for shard in ours}
    done, total = sum(sizes[shard] for shard in ours if shards.holds(shard)), sum(sizes.values())
    report("embedding", done, total)
    with ThreadPoolExecutor(AHEAD) as pool:
        for shard in ours:
            if shards.holds(shard):
                continue
            start, stop = shards.span(shard)
            spans = [(first, min(first + config.batch, stop)) for first in range(start, stop, config.batch)]
            batches = []
            for vectors_BD in pool.map(lambda span: source(*span), spans):
                batches.append(vectors_BD)
                done += len(vectors_BD)
                report("embedding", done, total)
            vectors_BD = np.concatenate(batches)
            finite_B = np.isfinite(vectors_BD).all(axis=1)
            if not finite_B.all():
                row = start + int(np.argmin(finite_B))
                raise ValueError(f'the embedding of passage "{corpus.ids[row]}" is not finite; check the encoder')
            shards.write(shard, vectors_BD)


def _wait_for_others(shards: Shards, report: Report) -> None:
    while missing := shards.missing():
        report("waiting for the shards of other parts", shards.count - len(missing), shards.count)
        time.sleep(WAIT_S)


def _tree(
    working: Path, shards: Shards, corpus: Corpus, encoder: Encoder, config: IndexConfig, report: Report
) -> dict[str, Any]:
    """What the manifest says of the tree and of the recall that was measured, and on how many queries."""
    if config.kind == "exact" or shards.rows < approximate.SCAN_BELOW:
        return {"tree": None, "recall": 1.0, "measured_on": 0}  # every inner product is computed
    if not (working / MEASURED).exists():
        report("building the tree", 0, 0)
        shutil.rmtree(working / TREE, ignore_errors=True)
        tree = approximate.build_tree(
            _float32_file(shards, working / FLOATS), approximate.shape_for(shards.rows, shards.size)
        )
        report("measuring recall", 0, 0)
        probes_QD = encoder(_probes(corpus, 2 * PROBES))
        probes_QD = probes_QD[probes_QD.any(axis=1)]
        exact_QN, _ = ExactIndex(shards).search(probes_QD, approximate.TOP)
        # Odd probes are held out: a tree finds what it was tuned with better than what it will be asked.
        tree = approximate.tune(tree, probes_QD[::2], exact_QN[::2], config.recall)
        found_QN, _ = tree.search(probes_QD[1::2], approximate.TOP)
        approximate.save_tree(tree, working / TREE)
        recall = approximate.recall_of(found_QN, exact_QN[1::2])
        measured = {"tree": asdict(tree.settings), "recall": recall, "measured_on": len(found_QN)}
        write_json(working / MEASURED, measured)
    return json.loads((working / MEASURED).read_text())


def _float32_file(shards: Shards, path: Path) -> np.ndarray:
    """All vectors as ScaNN takes them, in a file and not in memory: ScaNN makes copies of its own while it trains."""
    with path.open("wb") as file:
        for shard in range(shards.count):
            start, stop = shards.span(shard)
            file.write(shards[start:stop])
    return np.memmap(path, np.float32, mode="r", shape=shards.shape)


def _probes(corpus: Corpus, count: int) -> list[str]:
    """Stretches of text as long as a question, from passages spread over the corpus.

    They stand in for queries when ScaNN is tuned: a whole passage would be too easy, since it finds itself.
    """
    rows = np.linspace(0, len(corpus) - 1, count).astype(int)
    return [" ".join(corpus.contents[row].split()[-PROBE_WORDS:]) for row in rows]


def _need_space(working: Path, shards: Shards, config: IndexConfig) -> None:
    """Raises OSError before long work that the disk cannot hold."""
    stored = sum(shards.span(shard)[1] - shards.span(shard)[0] for shard in shards.missing())
    needed = stored * shards.size * (4 if config.dtype == "float32" else 2)
    if config.kind == "scann" and shards.rows >= approximate.SCAN_BELOW:
        needed += shards.rows * shards.size * 4  # the float32 file for ScaNN
        needed += shards.rows * (shards.size * 2 + shards.size // 2 + 8)  # its own: bfloat16, codes, a leaf
    free = shutil.disk_usage(working).free
    if needed > free:
        raise OSError(
            f"{working}: needs {_size(needed)} on a disk that has {_size(free)} free: make room, or "
            "build on another disk"
        )


def _size(count: float) -> str:
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if count >= unit), (1e3, "kB"))
    return f"{count / unit:,.1f} {name}"


def _looks(path: Path) -> list[Any]:
    """What a file that did not change keeps: its place, size and time."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    stat = os.stat(path)
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
