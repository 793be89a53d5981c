"""What an index of a given size will need: memory, disk and hours, from rates that are measured here and now."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memsearcher_jax.retrieval import approximate
from memsearcher_jax.retrieval.build import PROBES
from memsearcher_jax.retrieval.corpus import store_corpus
from memsearcher_jax.retrieval.encode import Encoder
from memsearcher_jax.retrieval.index import ExactIndex

PASSAGE_WORDS = 100  # of the 2018 Wikipedia as retrievers cut it
PASSAGE_BYTES = 640  # of such a passage with its title
ID_BYTES = 16  # of an id and of where both texts end
TRAINING_COPIES = 2.3  # float32 copies in ScaNN's memory while it trains; measured on 100,000 x 256
ITERATIONS = 12  # of ScaNN's k-means, by default
SAMPLE_ROWS = 10_000  # vectors of the trees that are built to measure
SAMPLE_LEAVES = (50, 400)
TREES = 3  # of each, the quickest of which counts: what else the machine does only makes them slower
SAMPLE_PASSAGES = 32


@dataclass(frozen=True)
class Rates:
    """What this machine does in a second."""

    read_passages: float  # out of a JSONL file, checked and hashed
    embedded_passages: float  # by the encoder on this host's devices
    compared_numbers: float  # rows x leaves x dimensions, in ScaNN's k-means
    coded_numbers: float  # rows x dimensions, in ScaNN's quantiser
    scored_numbers: float  # rows x queries x dimensions, in exact search


@dataclass(frozen=True)
class Line:
    """One quantity of the plan, and how it was computed."""

    name: str
    value: float
    unit: str  # "GB", or "h" for hours
    arithmetic: str

    def __str__(self) -> str:
        return f"{self.name:34} {self.value:10,.2f} {self.unit:2}   {self.arithmetic}"


def plan(rows: int, size: int, dtype: str, rates: Rates, hosts: int = 1) -> list[Line]:
    """Every quantity for `rows` passages of `size` dimensions, embedded by `hosts` like this one."""
    shape = approximate.shape_for(rows, size)
    R, D, L = f"{rows:,}", f"{size:,}", f"{shape.leaves:,}"
    width = 4 if dtype == "float32" else 2
    sampled = min(rows, approximate.SAMPLED_PER_LEAF * shape.leaves)
    codes = -(-size // shape.block_size)
    text = rows * (PASSAGE_BYTES + ID_BYTES)
    stored, floats = rows * size * width, rows * size * 4
    centres = shape.leaves * size * 9  # in a file of tagged float64
    tree, loaded = rows * (2 * size + codes + 4) + centres, rows * (2 * size + codes / 2 + 4) + centres
    compared = (ITERATIONS * sampled + rows) * shape.leaves * size

    def gigabytes(name: str, value: float, arithmetic: str) -> Line:
        return Line(name, value / 1e9, "GB", arithmetic)

    def hours(name: str, seconds: float, arithmetic: str) -> Line:
        return Line(name, seconds / 3600, "h", arithmetic)

    times = [
        hours("reading the corpus", rows / rates.read_passages, f"{R} / {rates.read_passages:,.0f} passages/s"),
        hours(
            "embedding",
            rows / rates.embedded_passages / hosts,
            f"{R} / ({rates.embedded_passages:,.1f} passages/s x {hosts} hosts)",
        ),
        hours(
            "k-means and assignment",
            compared / rates.compared_numbers,
            f"({ITERATIONS} x {sampled:,} sampled + {R}) x {L} leaves x {D} / {rates.compared_numbers:.2e}/s",
        ),
        hours("quantising", rows * size / rates.coded_numbers, f"{R} x {D} / {rates.coded_numbers:.2e}/s"),
        hours(
            "exact search for the recall",
            2 * PROBES * rows * size / rates.scored_numbers,
            f"{2 * PROBES:,} queries x {R} x {D} / {rates.scored_numbers:.2e}/s",
        ),
    ]
    return [
        gigabytes("disk: passages", text, f"{R} x {PASSAGE_BYTES + ID_BYTES} bytes"),
        gigabytes("disk: embeddings", stored, f"{R} x {D} x {width} bytes ({dtype})"),
        gigabytes("disk: ScaNN", tree, f"{R} x ({D} x 2 bytes + {codes} codes + 4) + {L} leaves x {D} x 9"),
        gigabytes("disk, while it is built", text + stored + tree + floats, f"the above + {R} x {D} x 4 for ScaNN"),
        gigabytes("host memory to search", loaded, "ScaNN, two codes to a byte; passages are memory-mapped"),
        gigabytes(
            "host memory to build",
            TRAINING_COPIES * floats,
            f"{TRAINING_COPIES} copies of {R} x {D} x 4 bytes, measured",
        ),
        *times,
        hours("in all", sum(line.value for line in times) * 3600, "one after the other"),
    ]


def measure(encoder: Encoder, size: int) -> Rates:
    """Rates of this machine, on made-up passages and vectors; takes a minute or two.

    Raises ValueError where other work on the machine disturbs the measurement so much that it means nothing.
    """
    draw = np.random.default_rng(0)
    words = ["".join(letters) for letters in draw.choice(list("abcdefghijklmnopqrstuvwxyz"), (2_000, 5))]
    passages = [" ".join(draw.choice(words, PASSAGE_WORDS)) for _ in range(SAMPLE_ROWS)]

    def timed(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "corpus.jsonl"
        file.write_text("".join(f'{{"id": "{row}", "contents": "{text}"}}\n' for row, text in enumerate(passages)))
        reading = timed(lambda: store_corpus(file, Path(folder)))
    sample = passages[:SAMPLE_PASSAGES]
    encoder(sample)  # compiles
    embedding = timed(lambda: encoder(sample))

    vectors_RD = draw.standard_normal((SAMPLE_ROWS, size), np.float32)
    shape = approximate.shape_for(SAMPLE_ROWS, size)
    few, many = (
        min(timed(lambda leaves=leaves: _build(vectors_RD, leaves, shape.block_size)) for _ in range(TREES))
        for leaves in SAMPLE_LEAVES
    )
    if many <= few:
        raise ValueError(
            f"this machine is too busy to be measured: a tree of {SAMPLE_LEAVES[1]} leaves took {many:.1f} s, one of "
            f"{SAMPLE_LEAVES[0]} took {few:.1f} s; try again when it does nothing else"
        )
    # Two trees tell what depends on the leaves from what does not.
    sampled = [min(SAMPLE_ROWS, approximate.SAMPLED_PER_LEAF * leaves) for leaves in SAMPLE_LEAVES]
    work = [(ITERATIONS * s + SAMPLE_ROWS) * leaves * size for s, leaves in zip(sampled, SAMPLE_LEAVES, strict=True)]
    compared = (work[1] - work[0]) / (many - few)
    queries_QD = vectors_RD[:PROBES]
    scoring = timed(lambda: ExactIndex(vectors_RD).search(queries_QD, approximate.TOP))
    return Rates(
        read_passages=SAMPLE_ROWS / reading,
        embedded_passages=len(sample) / embedding,
        compared_numbers=compared,
        coded_numbers=SAMPLE_ROWS * size / max(few - work[0] / compared, 1e-3),
        scored_numbers=len(queries_QD) * SAMPLE_ROWS * size / scoring,
    )


def _build(vectors_RD: np.ndarray, leaves: int, block_size: int) -> None:
    approximate.build_tree(vectors_RD, approximate.TreeShape(leaves, block_size))
