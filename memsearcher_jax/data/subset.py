"""The training set of Mem-alpha from its full collection of streams: capped by source and by length.

Mem-alpha (arXiv 2509.25911, appendix A) keeps at most 100 of the 4,139 streams of each source, 562 in total, none of
more than 30,000 tokens. The two sets of in-context classification count as one source. The paper's draw is not
published as code; the published file of 562 rows is that draw, and a subset by this module is another one of the same
sizes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memsearcher_jax.types import Problem, Stream

POOLED = "icl_"  # sources with this prefix are one


@dataclass(frozen=True)
class SourceCounts:
    """How many streams of one source were read, were short enough, and were kept."""

    read: int
    short: int
    kept: int


def stratified_subset(
    problems: Sequence[Problem], per_source: int, seed: int, max_tokens: int, count_tokens: Callable[[str], int]
) -> tuple[list[Problem], dict[str, SourceCounts]]:
    """At most `per_source` streams of each source and at most `max_tokens` tokens each (0: any), in their order.

    What is kept of a source depends on its own streams and the seed alone. Raises ValueError for a problem that is not
    a stream.
    """
    streams = [_stream(problem) for problem in problems]
    rows_by_source: dict[str, list[int]] = {}
    for row, stream in enumerate(streams):
        source = f"{POOLED}*" if stream.source.startswith(POOLED) else stream.source
        rows_by_source.setdefault(source, []).append(row)
    kept, counts = set[int](), dict[str, SourceCounts]()
    for source, rows in rows_by_source.items():
        short = [row for row in rows if not max_tokens or sum(map(count_tokens, streams[row].chunks)) <= max_tokens]
        rng = np.random.default_rng([seed, zlib.crc32(source.encode())])
        chosen = rng.choice(len(short), min(per_source, len(short)), replace=False)
        kept |= {short[index] for index in chosen}
        counts[source] = SourceCounts(len(rows), len(short), len(chosen))
    return [problems[row] for row in sorted(kept)], counts


def stream_row(problem: Problem) -> dict[str, Any]:
    """The row of a file of streams, as `readers.read_problems` reads it."""
    stream = _stream(problem)
    questions = [{"question": one.text, "answer": one.answer, "kind": one.kind} for one in stream.questions]
    return {
        "instance_id": problem.id.removeprefix(f"{stream.source}/"),
        "data_source": stream.source,
        "chunks": json.dumps(stream.chunks),
        "questions_and_answers": json.dumps(questions),
        "num_chunks": len(stream.chunks),
        "num_questions": len(stream.questions),
    }


def _stream(problem: Problem) -> Stream:
    if problem.stream is None:
        raise ValueError(f"problem {problem.id!r} is a question: give files of streams")
    return problem.stream
