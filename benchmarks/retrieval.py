"""Search by ScaNN against FAISS: queries/s at the same recall, on one core, and the memory that each takes.

pip install -e '.[bench]'
python benchmarks/retrieval.py                                           # 200,000 and 1,000,000 clustered vectors
python benchmarks/retrieval.py --rows 200000 --encoder DIR --wiki DIR    # and real ones: a corpus with questions

Every engine is tuned to the same recall@5 against exact search on the queries that are timed, and all take turns on one
core. What took long to make is kept in --cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import faiss
import numpy as np

from memsearcher_jax.retrieval import approximate
from memsearcher_jax.retrieval.approximate import TOP, TreeSettings, recall_of
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.search import Searcher, open_searcher
from memsearcher_jax.retrieval.workplace import write_json
from memsearcher_jax.rl import embedder

RECALL = 0.95
BATCH, QUERIES, ROUNDS = 64, 1_024, 7
SIZE, ROWS_PER_CLUSTER, DECAY = 384, 200, 0.5
SPREAD = 1.1  # of the members of a cluster, as a multiple of that of the centres
QUESTIONS = ("2wikimultihopqa", "hotpotqa", "musique")
NAMED_WEIGHTS = (0, 0.25, 1)  # beside the one that is set
PROBED = sorted({int(1.1**power) for power in range(75)})  # lists, and candidates, that are tried in this order

Search = Callable[[np.ndarray], np.ndarray]
"""Queries to the row numbers of the best five."""


@dataclass(frozen=True)
class Data:
    """What is searched, and by what."""

    name: str
    vectors_RD: np.ndarray
    queries_QD: np.ndarray


@dataclass(frozen=True)
class Engine:
    """One engine at the setting that reaches the recall."""

    name: str
    search: Search
    recall: float
    memory_mb: float


@dataclass(frozen=True)
class Result:
    data: str
    engine: str
    recall: float
    queries_per_second: float
    memory_mb: float


def clustered(rows: int) -> Data:
    """Unit vectors in overlapping clusters, with variances that fall off as those of text embeddings do."""
    fixed = np.random.default_rng(99)
    scale_D = np.arange(1, SIZE + 1, dtype=np.float32) ** -DECAY
    turn_DD = np.linalg.qr(fixed.standard_normal((SIZE, SIZE)))[0].astype(np.float32)
    centre_CD = fixed.standard_normal((max(rows // ROWS_PER_CLUSTER, 100), SIZE), np.float32)

    def drawn(count: int, seed: int) -> np.ndarray:
        draw, out_RD = np.random.default_rng(seed), np.empty((count, SIZE), np.float32)
        for start in range(0, count, 50_000):
            block_BD = out_RD[start : start + 50_000]
            chosen_BD = centre_CD[draw.integers(len(centre_CD), size=len(block_BD))]
            block_BD[:] = (chosen_BD + SPREAD * draw.standard_normal(block_BD.shape, np.float32)) * scale_D @ turn_DD
            block_BD /= np.linalg.norm(block_BD, axis=1, keepdims=True)
        return out_RD

    return Data(f"{rows:,} clustered", drawn(rows, 0), drawn(QUERIES, 1))


def real(wiki: Path, encoder: str, cache: Path) -> tuple[Data, list[dict]]:
    """The vectors of a corpus and of its questions; and how many supporting titles each way of searching finds."""
    config = RetrievalConfig(corpus=str(wiki / "corpus.jsonl"), encoder=encoder)
    load = partial(embedder.load, config)
    folder = cache / wiki.name
    ways = {
        "MiniLM exact": RetrievalConfig(**asdict(config) | {"kind": "exact"}),
        "MiniLM ScaNN": config,
        "BM25": RetrievalConfig(**asdict(config) | {"method": "bm25"}),
        "hybrid": RetrievalConfig(**asdict(config) | {"method": "hybrid"}),
    }
    open_searcher(config, folder, (), load)  # builds what is not there
    questions = {name: _jsonl(wiki / name / "dev.jsonl") for name in QUESTIONS}
    searchers = {way: open_searcher(settings, folder, (), load) for way, settings in ways.items()}
    for weight in NAMED_WEIGHTS:
        searchers[f"hybrid, names x {weight:g}"] = _with_names(searchers["hybrid"], weight)
    table = []
    for way, searcher in searchers.items():
        shares = {name: _support(searcher, rows) for name, rows in questions.items()}
        table.append({"way": way} | shares)
        print(f"{way:18}", "  ".join(f"{name} {share:.3f}" for name, share in shares.items()), flush=True)
    asked = load(encoder).queries([row["question"] for rows in questions.values() for row in rows])
    vectors_RD = open_searcher(ways["MiniLM exact"], folder, (), load).source.ranker.index.vectors_RD
    return Data(f"{wiki.name}, MiniLM", vectors_RD, asked), table


def _with_names(hybrid: Searcher, weight: float) -> Searcher:
    """The same search, in which what the best passage names weighs more or less."""
    ranker = replace(hybrid.source.ranker, named_weight=weight)
    return Searcher(replace(hybrid.source, ranker=ranker))


def _jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _support(searcher: Searcher, rows: Sequence[dict]) -> float:
    """Share of a question's supporting titles that are in the top five, the mean over questions."""
    found = searcher.search([row["question"] for row in rows], TOP)
    wanted = [set(row["metadata"]["supporting_titles"]) for row in rows]
    shares = [len(titles & {p.title for p in top}) / len(titles) for titles, top in zip(wanted, found, strict=True)]
    return statistics.mean(shares)


def exact(data: Data) -> np.ndarray:
    index = faiss.IndexFlatIP(data.vectors_RD.shape[1])
    index.add(data.vectors_RD)
    return index.search(data.queries_QD, TOP)[1]


def scann_engine(data: Data, cache: Path) -> Engine:
    folder = cache / f"{_file_name(data)}.scann"
    rows, size = data.vectors_RD.shape
    shape = approximate.shape_for(rows, size)
    if not folder.exists():
        started = time.perf_counter()
        approximate.save_tree(approximate.build_tree(data.vectors_RD, shape), folder)
        print(f"ScaNN built in {time.perf_counter() - started:.0f} s", flush=True)
    settings = TreeSettings(shape.leaves, shape.block_size, shape.leaves, approximate.CANDIDATES[-1], 0.0)
    tree = approximate.load_tree(folder, rows, settings)
    tree = approximate.tune(tree, data.queries_QD, exact(data), RECALL)
    s = tree.settings
    name = f"ScaNN, {s.leaves_searched} of {s.leaves} leaves, {s.candidates} candidates"
    return Engine(name, lambda queries: tree.search(queries, TOP)[0], s.recall, memory_of("scann", folder))


def faiss_engines(data: Data, cache: Path, links: Sequence[int]) -> Iterator[Engine]:
    """Every FAISS index worth comparing with, at the least setting with the recall."""
    rows, size = data.vectors_RD.shape
    expected_QN = exact(data)
    for times in (1, 2, 4):
        lists = int(times * rows**0.5)

        def make_ivf(lists: int = lists) -> faiss.Index:
            index = faiss.IndexIVFFlat(faiss.IndexFlatIP(size), size, lists, faiss.METRIC_INNER_PRODUCT)
            index.cp.max_points_per_centroid = 100
            index.train(data.vectors_RD)
            return index

        yield _tuned(f"FAISS IVF, {lists} lists", data, cache, make_ivf, "nprobe", expected_QN)
    for link in links:

        def make_hnsw(link: int = link) -> faiss.Index:
            index = faiss.IndexHNSWFlat(size, link, faiss.METRIC_INNER_PRODUCT)
            index.hnsw.efConstruction = 6 * link
            return index

        yield _tuned(f"FAISS HNSW, {link} links", data, cache, make_hnsw, "efSearch", expected_QN)


def _tuned(
    name: str, data: Data, cache: Path, make: Callable[[], faiss.Index], knob: str, expected_QN: np.ndarray
) -> Engine:
    file = cache / f"{_file_name(data)}.{name.replace(', ', '.').replace(' ', '')}"
    if not file.exists():
        started = time.perf_counter()
        index = make()
        index.add(data.vectors_RD)
        faiss.write_index(index, str(file))
        print(f"{name}: built in {time.perf_counter() - started:.0f} s", flush=True)
    index = faiss.read_index(str(file))
    for value in PROBED:
        setattr(index if knob == "nprobe" else index.hnsw, knob, value)
        recall = recall_of(index.search(data.queries_QD, TOP)[1], expected_QN)
        if recall >= RECALL:
            search = lambda queries: index.search(queries, TOP)[1]  # noqa: E731
            return Engine(f"{name}, {knob} {value}", search, recall, memory_of("faiss", file))
    raise ValueError(f"{name} reaches a recall of {recall:.3f} only")


def memory_of(kind: str, path: Path) -> float:
    """Megabytes that an engine takes in a process of its own, once it is loaded."""
    command = [sys.executable, __file__, "--memory_of", kind, str(path)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def print_memory(kind: str, path: Path) -> None:
    import scann

    before = _resident_mb()
    loaded = faiss.read_index(str(path)) if kind == "faiss" else scann.scann_ops_pybind.load_searcher(str(path))
    after = _resident_mb()
    del loaded
    print(after - before)


def _resident_mb() -> float:
    """Memory that is this process's own; mapped files are not."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1e3


def race(data: Data, engines: Sequence[Engine]) -> list[Result]:
    """Queries/s of every engine, the median of several rounds in which all take turns on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    faiss.omp_set_num_threads(1)
    seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for _ in range(ROUNDS):
        for engine in engines:
            started = time.perf_counter()
            for start in range(0, len(data.queries_QD), BATCH):
                engine.search(data.queries_QD[start : start + BATCH])
            seconds[engine.name].append(time.perf_counter() - started)
    os.sched_setaffinity(0, cores)
    faiss.omp_set_num_threads(len(cores))
    return [
        Result(
            data.name, one.name, one.recall, len(data.queries_QD) / statistics.median(seconds[one.name]), one.memory_mb
        )
        for one in engines
    ]


def compare(data: Data, cache: Path, links: Sequence[int]) -> list[Result]:
    results = race(data, [scann_engine(data, cache), *faiss_engines(data, cache, links)])
    print(f"\n{data.name}, recall@{TOP} at least {RECALL}, batches of {BATCH}, one core")
    for one in results:
        print(f"{one.engine:44} {one.recall:.3f} {one.queries_per_second:10,.0f} queries/s {one.memory_mb:8,.0f} MB")
    ours, theirs = results[0], max(results[1:], key=lambda one: one.queries_per_second)
    least = min(one.memory_mb for one in results[1:])
    print(
        f"ScaNN is {ours.queries_per_second / theirs.queries_per_second:.2f} times as quick as the better one, "
        f"with {ours.memory_mb / least:.2f} of the least memory\n",
        flush=True,
    )
    return results


def _file_name(data: Data) -> str:
    return data.name.replace(" ", "-").replace(",", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[200_000, 1_000_000], help="sizes of clustered data")
    parser.add_argument("--links", type=int, nargs="*", default=[16, 32], help="of FAISS's HNSW")
    parser.add_argument("--wiki", type=Path, help="a folder with corpus.jsonl and NAME/dev.jsonl")
    parser.add_argument("--encoder", default="", help="the Hugging Face folder of the encoder for --wiki")
    parser.add_argument("--cache", type=Path, default=Path("runs/benchmark"), help="keeps what took long to make")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--memory_of", nargs=2, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.memory_of:
        return print_memory(flags.memory_of[0], Path(flags.memory_of[1]))
    # Without it FAISS computes small batches of exact search with matrix products, ten times as slowly on few cores.
    faiss.cvar.distance_compute_blas_threshold = 1
    flags.cache.mkdir(parents=True, exist_ok=True)
    results, support = [], []
    if flags.wiki:
        data, support = real(flags.wiki, flags.encoder, flags.cache)
        results += compare(data, flags.cache, flags.links)
    for rows in flags.rows:
        results += compare(clustered(rows), flags.cache, flags.links)
    if flags.json:
        write_json(flags.json, {"speed": [asdict(result) for result in results], "support": support})


if __name__ == "__main__":
    main()
