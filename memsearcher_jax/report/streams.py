"""An evaluation of memories of streams in numbers: accuracy by source, what the memory holds, how it was written.

The score of a stream is the mean over its questions, that of a source the mean over its streams (Mem-alpha). Where the
streams of one source differ in length, each length is reported apart as well.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from memsearcher_jax.report.console import plain
from memsearcher_jax.report.page_facts import Facts

FAILED = "calls_failed/"  # counts of errors by their kind have names that begin so


@dataclass(frozen=True)
class Memories:
    """The streams of one source, or of one source and length. Tokens are means over streams."""

    streams: int
    unscored: int  # streams without a score: not read to their end, or without an answer
    questions: int
    answers_failed: int
    accuracy: float  # NaN where nothing was scored
    kinds: dict[str, float]  # accuracy by the kind of question
    chunks: float
    stream_tokens: float
    memory_tokens: float
    tokens_by_store: dict[str, float]
    compression: float  # 1 - memory / stream, over all streams together; may be negative
    calls: int
    ok: float  # shares of the calls
    skipped: float
    failed: float
    failures: dict[str, int]  # by kind of error, the most frequent first
    tools: dict[str, int]  # how often each was called


def memories_by_source(facts: Sequence[Facts]) -> dict[str, Memories]:
    """The numbers of every source; "source, n chunks" where its streams have several lengths."""
    groups: dict[str, list[Facts]] = {}
    for one in facts:
        groups.setdefault(one.dataset, []).append(one)
    numbers = {}
    for source, group in groups.items():
        numbers[source] = _memories(source, group)
        lengths = sorted({one.counts.get("chunks", 0) for one in group})
        for length in lengths if len(lengths) > 1 else ():
            same = [one for one in group if one.counts.get("chunks", 0) == length]
            numbers[f"{source}, {length} chunks"] = _memories(source, same)
    return numbers


def memories_json(numbers: Mapping[str, Memories]) -> dict[str, Any]:
    """As JSON holds it: what is no number is null."""
    return {name: without_nan(asdict(one)) for name, one in numbers.items()}


def without_nan(value: Any) -> Any:
    """The value, or the dictionary with its values at any depth; None in place of NaN."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def show_memories(numbers: Mapping[str, Memories], console: Console) -> None:
    """Three tables with a row for each source: answers, tokens by store, operations."""
    answers = _table("", "streams", "questions", "accuracy", "saved")
    tokens = _table("tokens", "stream", "memory", "core", "semantic", "episodic")
    calls = _table("calls", "all", "ok", "skipped", "failed", "failures")
    calls.columns[-1].justify = "left"
    for name, one in numbers.items():
        label = plain(name)
        answers.add_row(
            label, f"{one.streams:,}", f"{one.questions:,}", _percent(one.accuracy), _percent(one.compression)
        )
        stores = [f"{one.tokens_by_store[store]:,.0f}" for store in ("core", "semantic", "episodic")]
        tokens.add_row(label, f"{one.stream_tokens:,.0f}", f"{one.memory_tokens:,.0f}", *stores)
        shares = [_percent(share) for share in (one.ok, one.skipped, one.failed)]
        failures = ", ".join(f"{kind} {count:,}" for kind, count in one.failures.items())
        calls.add_row(label, f"{one.calls:,}", *shares, plain(failures))
    for table in (answers, tokens, calls):
        console.print(table)
        console.print()
    console.print("shares in percent; accuracy and tokens are means over streams", style="dim")
    lost = {name: (one.unscored, one.answers_failed) for name, one in numbers.items()}
    for name, (streams, answers) in lost.items():
        if streams or answers:
            console.print(plain(f"{name}: {streams} streams without a score, {answers} answers failed", "bold red"))


def _memories(source: str, group: Sequence[Facts]) -> Memories:
    total: Counter[str] = Counter()
    for one in group:
        total.update(one.counts)
    calls = total["calls"]

    def share(name: str) -> float:
        return total[name] / calls if calls else 0.0

    stream, memory = total["stream_tokens"], total["memory_tokens"]
    kinds = sorted({name for one in group for name in one.scores if name.startswith(f"accuracy/{source}/")})
    failures = Counter({name.removeprefix(FAILED): count for name, count in total.items() if name.startswith(FAILED)})
    return Memories(
        streams=len(group),
        unscored=sum(math.isnan(one.reward) for one in group),
        questions=total["questions"],
        answers_failed=total["answers_failed"],
        accuracy=_mean(one.scores.get("accuracy", math.nan) for one in group),
        kinds={name.rpartition("/")[2]: _mean(one.scores.get(name, math.nan) for one in group) for name in kinds},
        chunks=total["chunks"] / len(group),
        stream_tokens=stream / len(group),
        memory_tokens=memory / len(group),
        tokens_by_store={
            store: total[f"memory_tokens/{store}"] / len(group) for store in ("core", "semantic", "episodic")
        },
        compression=1 - memory / stream if stream else math.nan,
        calls=calls,
        ok=share("calls_ok"),
        skipped=share("calls_skipped"),
        failed=share("calls_failed"),
        failures=dict(failures.most_common()),
        tools={
            name.removeprefix("calls/"): count for name, count in sorted(total.items()) if name.startswith("calls/")
        },
    )


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _percent(share: float) -> str:
    return "?" if math.isnan(share) else f"{100 * share:.1f}"


def _table(*columns: str) -> Table:
    table = Table(*columns, box=None, header_style="dim", pad_edge=False, padding=(0, 1))
    for column in table.columns[1:]:
        column.justify = "right"
    return table
