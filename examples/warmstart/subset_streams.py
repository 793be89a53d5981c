"""Draws a training set for Mem-alpha from files of streams: at most 100 of each source, none of above 30,000 tokens.

python -m examples.warmstart.subset_streams train.parquet --out subset.jsonl --tokenizer DIR

Mem-alpha (arXiv 2509.25911, appendix A) keeps 562 of its 4,139 streams so. The two sets of in-context classification
count as one source. The paper's draw is not published as code; the published file of 562 rows is that draw, and this
script makes another one of the same sizes.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from memsearcher_jax.data.readers import read_problems
from memsearcher_jax.jsonl import encode_line
from memsearcher_jax.launch import cli, outputs
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.tokenizer import ChatTokenizer
from memsearcher_jax.types import Problem

PER_SOURCE = 100
MAX_TOKENS = 30_000
SEED = 42
POOLED = "icl_"  # sources with this prefix are one


@dataclass(frozen=True)
class SubsetStreams:
    """Draw a stratified subset of streams, as Mem-alpha does."""

    files: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="FILE...")]
    """Files of streams: .parquet, or .jsonl with the same fields."""
    tokenizer: Path
    """Directory with the tokenizer.json that counts the tokens: that of the model to train."""
    out: Path
    """File to write; it must be new. --data.train reads it."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse_flags(SubsetStreams, argv)
        outputs.require_new_file(flags.out)
        problems = [problem for file in flags.files for problem in read_problems(file)]
        subset = draw(problems, ChatTokenizer.load(flags.tokenizer).count)
        atomic_write(flags.out, "".join(encode_line(stream_row(problem)) for problem in subset).encode())
    counts = ", ".join(f"{count} of {source}" for source, count in Counter(map(source_of, subset)).items())
    print(f"{flags.out}: {len(subset):,} of {len(problems):,} streams ({counts})")


def source_of(problem: Problem) -> str:
    """The source that the stream counts for. Raises ValueError for a problem that is not a stream."""
    if problem.stream is None or problem.golden_answers:
        raise ValueError(f"problem {problem.id!r} is a question: give files of streams")
    return f"{POOLED}*" if problem.stream.source.startswith(POOLED) else problem.stream.source


def draw(problems: Sequence[Problem], count_tokens: Callable[[str], int], seed: int = SEED) -> list[Problem]:
    """The subset, in order. What is kept of a source depends on its own streams and the seed alone."""
    rows: dict[str, list[int]] = {}
    for row, problem in enumerate(problems):
        short = rows.setdefault(source_of(problem), [])
        if sum(map(count_tokens, problem.stream.chunks)) <= MAX_TOKENS:
            short.append(row)
    kept = set[int]()
    for source, short in rows.items():
        rng = np.random.default_rng([seed, zlib.crc32(source.encode())])
        kept |= {short[index] for index in rng.choice(len(short), min(PER_SOURCE, len(short)), replace=False)}
    return [problems[row] for row in sorted(kept)]


def stream_row(problem: Problem) -> dict[str, Any]:
    """The row of a file of streams, as `readers.read_problems` reads it."""
    stream = problem.stream
    return {
        "instance_id": problem.id.removeprefix(f"{stream.source}/"),
        "data_source": stream.source,
        "chunks": stream.chunks,
        "questions_and_answers": [
            {"question": question.text, "answer": question.answer, "kind": question.kind}
            for question in stream.questions
        ],
    }


if __name__ == "__main__":
    cli.run(main)
