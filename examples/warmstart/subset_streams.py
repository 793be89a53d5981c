"""Draws a training set for Mem-alpha from files of streams: at most N of each source, none longer than a limit.

python -m examples.warmstart.subset_streams train.parquet --out subset.jsonl --tokenizer DIR

Mem-alpha (arXiv 2509.25911, appendix A) keeps at most 100 of the 4,139 streams of each source, 562 in total, none of
more than 30,000 tokens. The two sets of in-context classification count as one source. The paper's draw is not
published as code; the published file of 562 rows is that draw, and this script makes another one of the same sizes.
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
from memsearcher_jax.ranges import Count, CountOrZero, Seed
from memsearcher_jax.runtime.tokenizer import ChatTokenizer
from memsearcher_jax.types import Problem

POOLED = "icl_"  # sources with this prefix are one


@dataclass(frozen=True)
class SubsetStreams:
    """Draw a stratified subset of streams. The defaults are Mem-alpha's: 562 streams of its 4,139."""

    files: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="FILE...")]
    """Files of streams: .parquet, or .jsonl with the same fields."""
    tokenizer: Path
    """Directory with the tokenizer.json that counts the tokens: that of the model to train."""
    out: Path
    """File to write; it must be new. --data.train reads it."""
    per_source: Count = 100
    """Maximum number of streams of each source."""
    max_tokens: CountOrZero = 30_000
    """Streams with more tokens are left out; 0: none is."""
    seed: Seed = 42
    """Seed of the draw."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse_flags(SubsetStreams, argv)
        outputs.require_new_file(flags.out)
        problems = [problem for file in flags.files for problem in read_problems(file)]
        count = ChatTokenizer.load(flags.tokenizer).count
        subset = stratified_subset(problems, flags.per_source, flags.seed, flags.max_tokens, count)
        if len({problem.id for problem in subset}) < len(subset):
            raise ValueError("two of the files have a stream with the same id: give each file once")
        if not subset:
            raise ValueError(f"no stream has at most {flags.max_tokens} tokens: raise --max_tokens")
        atomic_write(flags.out, "".join(encode_line(stream_row(problem)) for problem in subset).encode())
    kept = Counter(map(source_of, subset))
    for source, streams in Counter(map(source_of, problems)).items():
        print(f"{source}: {kept[source]:,} of {streams:,} streams")
    print(f"{flags.out}: {len(subset):,} of {len(problems):,} streams")


def source_of(problem: Problem) -> str:
    """The source that the stream counts for. Raises ValueError for a problem that is not a stream."""
    if problem.stream is None:
        raise ValueError(f"problem {problem.id!r} is a question: give files of streams")
    return f"{POOLED}*" if problem.stream.source.startswith(POOLED) else problem.stream.source


def stratified_subset(
    problems: Sequence[Problem], per_source: int, seed: int, max_tokens: int, count_tokens: Callable[[str], int]
) -> list[Problem]:
    """At most `per_source` streams of each source and at most `max_tokens` tokens each (0: any), in their order.

    What is kept of a source depends on its own streams and the seed alone.
    """
    rows: dict[str, list[int]] = {source_of(problem): [] for problem in problems}
    for row, problem in enumerate(problems):
        if not max_tokens or sum(map(count_tokens, problem.stream.chunks)) <= max_tokens:
            rows[source_of(problem)].append(row)
    kept = set[int]()
    for source, short in rows.items():
        rng = np.random.default_rng([seed, zlib.crc32(source.encode())])
        kept |= {short[index] for index in rng.choice(len(short), min(per_source, len(short)), replace=False)}
    return [problems[row] for row in sorted(kept)]


def stream_row(problem: Problem) -> dict[str, Any]:
    """The row of a file of streams, as `readers.read_problems` reads it."""
    stream = problem.stream
    return {
        "instance_id": problem.id.removeprefix(f"{stream.source}/"),
        "data_source": stream.source,
        "chunks": stream.chunks,
        "questions_and_answers": [
            {"question": one.text, "answer": one.answer, "kind": one.kind} for one in stream.questions
        ],
    }


if __name__ == "__main__":
    cli.run(main)
