"""ScaNN against FAISS: queries/s at equal recall on one core.

pip install -e '.[bench]'
python benchmarks/retrieval.py --rows 200000 1000000

Every engine is tuned to the same recall@5 on the queries that are timed, and all take turns on one core. Indexes are
cached in --cache.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import common
import faiss
import numpy as np
import tyro

from memsearcher_jax.retrieval import scann_index
from memsearcher_jax.retrieval.scann_index import TOP, recall_at_n

RECALL = 0.95
BATCH, QUERIES, ROUNDS = 64, 1_024, 7
SIZE, ROWS_PER_CLUSTER, DECAY = 384, 200, 0.5
SPREAD = 1.1  # standard deviation within a cluster, relative to that of the centres
EFFORTS = sorted({int(1.1**power) for power in range(75)})  # values of nprobe and efSearch, in order

Search = Callable[[np.ndarray], np.ndarray]
"""Query vectors to the row numbers of the best five."""


@dataclass(frozen=True)
class Flags:
    """Command-line options."""

    rows: tuple[int, ...] = (200_000, 1_000_000)
    """Sizes of clustered data."""
    links: tuple[int, ...] = (16, 32)
    """Links per node of FAISS's HNSW."""
    cache: Path = Path("runs/benchmark")
    """Folder for the built indexes."""
    json: Path | None = None
    """Also write the results to this file."""


class Dataset(NamedTuple):
    name: str
    vectors_RD: np.ndarray
    queries_QD: np.ndarray


class Engine(NamedTuple):
    """A search library at the lowest setting that reaches the recall."""

    name: str
    search: Search
    recall: float


def clustered(rows: int) -> Dataset:
    """Unit vectors in overlapping clusters, whose variances decay like those of text embeddings."""
    centre_rng = np.random.default_rng(99)
    scale_D = np.arange(1, SIZE + 1, dtype=np.float32) ** -DECAY
    rotation_DD = np.linalg.qr(centre_rng.standard_normal((SIZE, SIZE)))[0].astype(np.float32)
    centre_CD = centre_rng.standard_normal((max(rows // ROWS_PER_CLUSTER, 100), SIZE), np.float32)

    def sample(count: int, seed: int) -> np.ndarray:
        rng, out_RD = np.random.default_rng(seed), np.empty((count, SIZE), np.float32)
        for start in range(0, count, 50_000):
            block_BD = out_RD[start : start + 50_000]
            own_centre_BD = centre_CD[rng.integers(len(centre_CD), size=len(block_BD))]
            block_BD[:] = (
                (own_centre_BD + SPREAD * rng.standard_normal(block_BD.shape, np.float32)) * scale_D @ rotation_DD
            )
            block_BD /= np.linalg.norm(block_BD, axis=1, keepdims=True)
        return out_RD

    return Dataset(f"{rows} clustered", sample(rows, 0), sample(QUERIES, 1))


def exact(data: Dataset) -> np.ndarray:
    index = faiss.IndexFlatIP(data.vectors_RD.shape[1])
    index.add(data.vectors_RD)
    return index.search(data.queries_QD, TOP)[1]


def scann_engine(data: Dataset, cache: Path) -> Engine:
    folder = cache / f"{data.name}.scann"
    rows, size = data.vectors_RD.shape
    settings = scann_index.untuned_settings(rows, size)
    if not folder.exists():
        started = time.perf_counter()
        scann_index.save_tree(scann_index.build_tree(data.vectors_RD, settings), folder)
        print(f"ScaNN built in {time.perf_counter() - started:.0f} s", flush=True)
    tree = scann_index.load_tree(folder, rows, settings)
    tree = scann_index.tune(tree, data.queries_QD, exact(data), RECALL)
    s = tree.settings
    name = f"ScaNN, {s.leaves_searched} of {s.leaves} leaves, {s.candidates} candidates"
    return Engine(name, lambda queries: tree.search(queries, TOP)[0], s.recall)


def faiss_engines(data: Dataset, cache: Path, links: Sequence[int]) -> Iterator[Engine]:
    """FAISS indexes at the lowest setting with the recall."""
    rows, size = data.vectors_RD.shape
    expected_QN = exact(data)
    for times in (1, 2, 4):
        lists = int(times * rows**0.5)
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(size), size, lists, faiss.METRIC_INNER_PRODUCT)
        index.cp.max_points_per_centroid = 100
        yield _tuned(f"FAISS IVF, {lists} lists", data, cache, index, "nprobe", expected_QN)
    for link in links:
        index = faiss.IndexHNSWFlat(size, link, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = 6 * link
        yield _tuned(f"FAISS HNSW, {link} links", data, cache, index, "efSearch", expected_QN)


def _tuned(
    name: str, data: Dataset, cache: Path, index: faiss.Index, parameter: str, expected_QN: np.ndarray
) -> Engine:
    """The empty `index`, built or read from the cache, at the lowest value of `parameter` with the recall."""
    file = cache / f"{data.name}.{name.replace(', ', '.').replace(' ', '')}"
    if not file.exists():
        started = time.perf_counter()
        index.train(data.vectors_RD)
        index.add(data.vectors_RD)
        faiss.write_index(index, str(file))
        print(f"{name}: built in {time.perf_counter() - started:.0f} s", flush=True)
    index = faiss.read_index(str(file))
    for value in EFFORTS:
        setattr(index if parameter == "nprobe" else index.hnsw, parameter, value)
        recall = recall_at_n(index.search(data.queries_QD, TOP)[1], expected_QN)
        if recall >= RECALL:
            search = lambda queries: index.search(queries, TOP)[1]  # noqa: E731
            return Engine(f"{name}, {parameter} {value}", search, recall)
    raise ValueError(f"{name} reaches a recall of {recall:.3f} only")


def compare(data: Dataset, cache: Path, links: Sequence[int]) -> list[dict]:
    """Queries/s of every engine: the median of several rounds in which all take turns on one core."""
    engines = [scann_engine(data, cache), *faiss_engines(data, cache, links)]
    batches = [data.queries_QD[start : start + BATCH] for start in range(0, len(data.queries_QD), BATCH)]
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    faiss.omp_set_num_threads(1)
    programs = {engine.name: lambda engine=engine: list(map(engine.search, batches)) and None for engine in engines}
    runs = common.alternate(programs, ROUNDS)
    os.sched_setaffinity(0, cores)
    faiss.omp_set_num_threads(len(cores))
    results = []
    print(f"\n{data.name}, recall@{TOP} at least {RECALL}, batches of {BATCH}, one core")
    for engine in engines:
        speed = len(data.queries_QD) / statistics.median(seconds for seconds, _ in runs[engine.name])
        print(f"{engine.name:44} {engine.recall:.3f} {speed:10,.0f} queries/s")
        result = {"dataset": data.name, "engine": engine.name, "recall": engine.recall}
        results.append(result | {"queries_per_second": speed})
    ratio = results[0]["queries_per_second"] / max(result["queries_per_second"] for result in results[1:])
    print(f"ScaNN: {ratio:.2f} x the queries/s of the fastest FAISS index\n")
    return results


def main(flags: Flags) -> None:
    # By default FAISS uses matrix products for small batches of exact search: ten times slower on few cores.
    faiss.cvar.distance_compute_blas_threshold = 1
    flags.cache.mkdir(parents=True, exist_ok=True)
    datasets = map(clustered, flags.rows)
    common.write_json([row for data in datasets for row in compare(data, flags.cache, flags.links)], flags.json)


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
