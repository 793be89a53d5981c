"""Nearest passages by inner product: an exact index, a ScaNN index, and the folder that keeps either on disk.

A folder holds `manifest.json`, the passages, the embeddings, the encoder's fitted state and, for a corpus that is
too large to scan, ScaNN's own files. It may be moved. It is written beside its place and renamed when whole.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol
from zipfile import BadZipFile

import numpy as np

from memsearcher_jax.retrieval import approximate
from memsearcher_jax.retrieval.corpus import Corpus, TextColumn
from memsearcher_jax.retrieval.encode import Encoder

FORMAT = 1  # of the folder; raised when an older reader would misread a newer one
EXACT_SCORES = 1 << 26  # scores that exact search holds at one time


class Index(Protocol):
    def search(self, vectors_QD: np.ndarray, top_n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `(ids_QN, scores_QN)`: row numbers (int64) and inner products (float32), best first.

        N is `top_n`, or the number of rows where that is smaller. A place that an approximate search leaves empty
        has id -1 and score -inf.
        """


@dataclass(frozen=True)
class ExactIndex:
    """Every inner product, computed. The oracle of the tests, and good enough for some 100,000 passages."""

    vectors_RD: np.ndarray  # float32, R rows

    def search(self, vectors_QD: np.ndarray, top_n: int) -> tuple[np.ndarray, np.ndarray]:
        n = min(top_n, len(self.vectors_RD))
        step = max(1, EXACT_SCORES // len(self.vectors_RD))
        parts = [self._search(vectors_QD[start : start + step], n) for start in range(0, len(vectors_QD), step)]
        if not parts:
            return np.zeros((0, n), np.int64), np.zeros((0, n), np.float32)
        return np.concatenate([ids for ids, _ in parts]), np.concatenate([scores for _, scores in parts])

    def _search(self, vectors_QD: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        score_QR = np.asarray(vectors_QD, np.float32) @ self.vectors_RD.T
        ids_QN = np.argpartition(-score_QR, n - 1, axis=1)[:, :n]
        scores_QN = np.take_along_axis(score_QR, ids_QN, axis=1)
        order_QN = np.lexsort((ids_QN, -scores_QN), axis=1)
        return np.take_along_axis(ids_QN, order_QN, axis=1), np.take_along_axis(scores_QN, order_QN, axis=1)


@dataclass(frozen=True)
class IndexConfig:
    """What a folder is built with; all of it is kept in the manifest."""

    encoder: str  # name of the encoder that made the vectors
    kind: Literal["scann", "exact"] = "scann"
    dtype: Literal["float32", "float16"] = "float32"  # of the embeddings on disk
    recall: float = 0.98  # of ScaNN's top five against exact search, on text from the corpus
    batch: int = 1024  # passages that one call of the encoder gets


@dataclass(frozen=True)
class StoredIndex:
    """An opened folder."""

    corpus: Corpus
    index: Index
    encoder_state: Mapping[str, np.ndarray] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)


def build(
    corpus: Corpus,
    encoder: Encoder,
    directory: Path,
    config: IndexConfig,
    encoder_state: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Embed `corpus` and write a folder that `open_index` reads.

    `encoder_state` is whatever arrays the encoder was fitted with; they come back from `open_index`.

    Raises:
      FileExistsError: `directory` exists; nothing in it is touched.
      ValueError: the encoder returned another shape, or numbers that are not finite; the passage is named.
    """
    if directory.exists():
        raise FileExistsError(f"{directory}: exists already; name another folder, or delete it to build anew")
    directory.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".partial", dir=directory.parent))
    try:
        _save_corpus(corpus, beside)
        vectors_RD = _embed(corpus, encoder, beside / "embeddings.npy", config)
        if encoder_state:
            np.savez(beside / "encoder.npz", **encoder_state)
        tree = None
        if config.kind == "scann" and len(corpus) >= approximate.SCAN_BELOW:
            tree = approximate.build_tree(np.asarray(vectors_RD, np.float32), _probes(corpus, encoder), config.recall)
            approximate.save_tree(tree, beside / "scann")
        manifest = {
            "format": FORMAT,
            "checksum": corpus.checksum,
            "passages": len(corpus),
            "dimensions": vectors_RD.shape[1],
            "config": asdict(config),
            "tree": asdict(tree.settings) if tree else None,
        }
        (beside / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        beside.chmod(0o755)  # mkdtemp makes folders that only their owner may read
        beside.rename(directory)
    except BaseException:
        shutil.rmtree(beside)
        raise


def open_index(
    directory: Path, *, encoder: str, kind: Literal["scann", "exact"] = "scann", checksum: str = ""
) -> StoredIndex:
    """Open a folder that `build` wrote; arrays are memory-mapped where they can be.

    Args:
      encoder: name of the encoder that will embed the queries; must be the one that embedded the passages.
      kind: "exact" reads every folder; "scann" a folder that was built as such.
      checksum: of the corpus that the folder must hold; empty accepts any.

    Raises:
      FileNotFoundError, ValueError: one line that says why this folder cannot serve, and the way out.
    """
    manifest = _read_manifest(directory)
    config = manifest["config"]
    if checksum and manifest["checksum"] != checksum:
        raise ValueError(f"{directory}: was built from another corpus (checksum differs); build an index anew")
    if config["encoder"] != encoder:
        raise ValueError(f'{directory}: was built with encoder "{config["encoder"]}", not "{encoder}"; build anew')
    if kind == "scann" and config["kind"] != "scann":
        raise ValueError(f'{directory}: was built for exact search; build anew, or choose kind "exact"')
    try:
        ids = _load_column(directory, "ids")
        contents = _load_column(directory, "contents")
        vectors_RD = np.load(directory / "embeddings.npy", mmap_mode="r")
        state = dict(np.load(directory / "encoder.npz")) if (directory / "encoder.npz").exists() else {}
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise ValueError(f"{directory}: is damaged ({error}); build the index anew") from error
    rows, size = manifest["passages"], manifest["dimensions"]
    if not len(ids) == len(contents) == rows or vectors_RD.shape != (rows, size):
        raise ValueError(f"{directory}: is damaged (its files disagree on the number of passages); build anew")
    return StoredIndex(
        corpus=Corpus(ids, contents, manifest["checksum"]),
        index=_index(directory, kind, vectors_RD, manifest["tree"]),
        encoder_state=state,
        manifest=manifest,
    )


def _index(directory: Path, kind: str, vectors_RD: np.ndarray, tree: Mapping[str, Any] | None) -> Index:
    if kind == "scann" and tree is not None:
        return approximate.load_tree(directory / "scann", len(vectors_RD), approximate.TreeSettings(**tree))
    vectors_RD = vectors_RD.astype(np.float32, copy=False)
    return ExactIndex(vectors_RD) if kind == "exact" else approximate.scan(vectors_RD)


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / "manifest.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory}: is not an index folder (no manifest.json)")
    try:
        manifest = json.loads(path.read_bytes())
        written = manifest["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: is damaged; build the index anew") from error
    if written != FORMAT:
        raise ValueError(f"{path}: has format {written}, this version reads {FORMAT}; build the index anew")
    return manifest


def _embed(corpus: Corpus, encoder: Encoder, path: Path, config: IndexConfig) -> np.ndarray:
    """Encode every passage into the array file at `path`, batch by batch; returns it, memory-mapped [R, D]."""
    out_RD = None
    for start in range(0, len(corpus), config.batch):
        texts = corpus.texts(start, start + config.batch)
        vectors_BD = encoder(texts)
        if vectors_BD.ndim != 2 or len(vectors_BD) != len(texts):
            raise ValueError(f"the encoder returned shape {vectors_BD.shape} for {len(texts)} texts")
        if out_RD is None:
            shape = (len(corpus), vectors_BD.shape[1])
            out_RD = np.lib.format.open_memmap(path, mode="w+", dtype=config.dtype, shape=shape)
        finite_B = np.isfinite(vectors_BD).all(axis=1)
        if not finite_B.all():
            row = start + int(np.argmin(finite_B))
            raise ValueError(f'the embedding of passage "{corpus.ids[row]}" is not finite; check the encoder')
        out_RD[start : start + len(texts)] = vectors_BD
    out_RD.flush()
    return out_RD


def _probes(corpus: Corpus, encoder: Encoder, count: int = 256, words: int = 12) -> np.ndarray:
    """float32 [count, D]: stretches of text as long as a question, from passages spread over the corpus.

    They stand in for queries when ScaNN is tuned: a whole passage would be too easy, since it finds itself.
    """
    rows = np.linspace(0, len(corpus) - 1, count).astype(int)
    return encoder([" ".join(corpus.contents[row].split()[-words:]) for row in rows])


def _save_corpus(corpus: Corpus, directory: Path) -> None:
    columns: Iterable[tuple[str, TextColumn]] = (("ids", corpus.ids), ("contents", corpus.contents))
    for name, column in columns:
        np.save(directory / f"{name}.npy", column.data)
        np.save(directory / f"{name}.offset.npy", column.offset)


def _load_column(directory: Path, name: str) -> TextColumn:
    data = np.load(directory / f"{name}.npy", mmap_mode="r")
    return TextColumn(data, np.load(directory / f"{name}.offset.npy", mmap_mode="r"))
