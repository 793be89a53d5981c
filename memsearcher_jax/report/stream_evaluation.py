"""Results of an evaluation on streams (Mem-alpha): accuracy by source, size of the memory, tool calls.

The score of a stream is the mean over its questions, that of a source the mean over its streams (Mem-alpha). If the
streams of a source differ in length, each length has a row of its own too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Console

from memsearcher_jax.report.console import make_table, safe_text
from memsearcher_jax.report.evaluation import percent
from memsearcher_jax.report.statistics import mean
from memsearcher_jax.types import TrajectorySummary

STORES = ("core", "semantic", "episodic")  # of the memory
NumberT = TypeVar("NumberT", int, float)


@dataclass(frozen=True)
class StreamResult:
    """The streams of one source, or of one source and length. Token counts are means over streams."""

    streams: int
    unscored: int  # streams without a score: not read to their end, or without an answer
    questions: int
    answers_failed: int
    accuracy: float  # NaN if no stream has a score
    kinds: dict[str, float]  # accuracy by kind of question
    chunks: float
    stream_tokens: float
    memory_tokens: float
    tokens_by_store: dict[str, float]
    compression: float  # 1 - memory / stream, over all streams together; may be negative
    calls: int
    ok: float  # fractions of the calls
    skipped: float
    failed: float
    failures: dict[str, int]  # by kind of error, the most frequent first
    tools: dict[str, int]  # number of calls of each


def summarize_streams(summaries: Sequence[TrajectorySummary]) -> dict[str, StreamResult]:
    """The results of every source; also of "source, n chunks" if its streams have several lengths."""
    groups: dict[str, list[TrajectorySummary]] = {}
    for summary in summaries:
        groups.setdefault(summary.dataset, []).append(summary)
    results = {}
    for source, group in groups.items():
        results[source] = _stream_result(source, group)
        lengths = sorted({summary.counts.get("chunks", 0) for summary in group})
        for length in lengths if len(lengths) > 1 else ():
            same_length = [summary for summary in group if summary.counts.get("chunks", 0) == length]
            results[f"{source}, {length} chunks"] = _stream_result(source, same_length)
    return results


def nan_to_none(value: Any) -> Any:
    """The value, or the dictionary at any depth, with None in place of NaN."""
    if isinstance(value, dict):
        return {key: nan_to_none(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def show_streams(results: Mapping[str, StreamResult], console: Console) -> None:
    """Print three tables with a row per source: answers, tokens by store, tool calls."""
    answers = make_table("", "streams", "questions", "accuracy", "compression")
    tokens = make_table("tokens", "stream", "memory", *STORES)
    calls = make_table("calls", "all", "ok", "skipped", "failed", "failures", left=("failures",))
    for name, result in results.items():
        label = safe_text(name)
        counts = (f"{result.streams:,}", f"{result.questions:,}")
        answers.add_row(label, *counts, percent(result.accuracy), percent(result.compression))
        sizes = (result.stream_tokens, result.memory_tokens, *(result.tokens_by_store[store] for store in STORES))
        tokens.add_row(label, *(f"{size:,.0f}" for size in sizes))
        fractions = map(percent, (result.ok, result.skipped, result.failed))
        failures = ", ".join(f"{kind} {count:,}" for kind, count in result.failures.items())
        calls.add_row(label, f"{result.calls:,}", *fractions, safe_text(failures))
    for table in (answers, tokens, calls):
        console.print(table)
        console.print()
    console.print("accuracy, compression and call outcomes in percent; means over streams", style="dim")
    for name, result in results.items():
        if result.unscored or result.answers_failed:
            text = f"{name}: {result.unscored} streams without a score, {result.answers_failed} answers failed"
            console.print(safe_text(text, "bold red"))


def _stream_result(source: str, group: Sequence[TrajectorySummary]) -> StreamResult:
    total: Counter[str] = Counter()
    for summary in group:
        total.update(summary.counts)
    calls, stream, memory = total["calls"], total["stream_tokens"], total["memory_tokens"]
    kind_prefix = f"accuracy/{source}/"
    kinds = sorted({kind for summary in group for kind in _with_prefix(summary.scores, kind_prefix)})
    failures = Counter(_with_prefix(total, "calls_failed/"))
    return StreamResult(
        streams=len(group),
        unscored=sum(math.isnan(summary.reward) for summary in group),
        questions=total["questions"],
        answers_failed=total["answers_failed"],
        accuracy=mean(known_scores(group, "accuracy")),
        kinds={kind: mean(known_scores(group, kind_prefix + kind)) for kind in kinds},
        chunks=total["chunks"] / len(group),
        stream_tokens=stream / len(group),
        memory_tokens=memory / len(group),
        tokens_by_store={store: total[f"memory_tokens/{store}"] / len(group) for store in STORES},
        compression=1 - memory / stream if stream else math.nan,
        calls=calls,
        ok=total["calls_ok"] / max(calls, 1),
        skipped=total["calls_skipped"] / max(calls, 1),
        failed=total["calls_failed"] / max(calls, 1),
        failures=dict(failures.most_common()),
        tools=dict(sorted(_with_prefix(total, "calls/").items())),
    )


def _with_prefix(values: Mapping[str, NumberT], prefix: str) -> dict[str, NumberT]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def known_scores(group: Iterable[TrajectorySummary], name: str) -> list[float]:
    """The scores of the streams that have one."""
    scores = (summary.scores.get(name, math.nan) for summary in group)
    return [score for score in scores if not math.isnan(score)]
