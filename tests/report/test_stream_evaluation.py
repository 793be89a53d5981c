"""Results of streams: by source and length, tokens by store, tool calls, missing scores."""

import io
import json
import math
from dataclasses import asdict

import pytest
from rich.console import Console

from memsearcher_jax.report.stream_evaluation import nan_to_none, show_streams, summarize_streams
from memsearcher_jax.types import StopReason, TrajectorySummary


def stream(source, chunks, accuracy, **counts):
    scores = {"accuracy": accuracy, f"accuracy/{source}": accuracy}
    scores |= {f"accuracy/{source}/event": accuracy / 2, f"accuracy/{source}/time/event": accuracy / 4}
    counts = {"chunks": chunks, "stream_tokens": 100 * chunks, "questions": 4, **counts}
    known = not math.isnan(accuracy)
    return TrajectorySummary(
        source, None, chunks, 0, StopReason.STREAM_READ, accuracy, scores if known else {}, (), counts=counts
    )


SUMMARIES = [
    stream("squad", 10, 0.5, memory_tokens=100, calls=4, calls_ok=2, calls_skipped=1, calls_failed=1),
    stream("squad", 10, 1.0, **{"memory_tokens": 300, "memory_tokens/semantic": 300, "calls/memory_update": 3}),
    stream(
        "made", 10, 0.25, **{"calls": 5, "calls_failed": 5, "calls_failed/Unexpected error": 3, "calls_failed/x": 2}
    ),
    stream("made", 130, math.nan, answers_failed=4, memory_tokens=14_000),
]


def test_results_by_source_and_by_length():
    results = summarize_streams(SUMMARIES)
    assert list(results) == ["squad", "made", "made, 10 chunks", "made, 130 chunks"]
    squad, kinds = results["squad"], {"event": 0.375, "time/event": 0.1875}
    assert (squad.streams, squad.questions, squad.accuracy, squad.kinds) == (2, 8, 0.75, kinds)
    assert (squad.stream_tokens, squad.memory_tokens, squad.tokens_by_store["semantic"]) == (1_000, 200, 150)
    assert squad.compression == pytest.approx(0.8)
    assert (squad.calls, squad.ok, squad.skipped, squad.failed) == (4, 0.5, 0.25, 0.25)
    assert squad.tools == {"memory_update": 3}
    assert results["made"].failures == {"Unexpected error": 3, "x": 2}
    assert results["made"].accuracy == 0.25, "a stream without a score is no zero"
    long = results["made, 130 chunks"]
    assert (long.unscored, long.answers_failed, math.isnan(long.accuracy)) == (1, 4, True)
    assert long.compression == pytest.approx(1 - 14_000 / 13_000), "a memory may be longer than its stream"


def test_nan_is_null_in_json():
    results = {name: asdict(result) for name, result in summarize_streams(SUMMARIES).items()}
    encoded = json.loads(json.dumps(nan_to_none(results), allow_nan=False))
    assert encoded["made, 130 chunks"]["accuracy"] is None and encoded["squad"]["accuracy"] == 0.75
    assert nan_to_none({"a": {"b": math.nan, "c": 1.0}}) == {"a": {"b": None, "c": 1.0}}


def test_the_tables_report_missing_scores_and_failed_answers():
    file = io.StringIO()
    show_streams(summarize_streams(SUMMARIES), Console(file=file, width=100))
    shown = file.getvalue()
    assert "made, 130 chunks: 1 streams without a score, 4 answers failed" in shown
    assert "squad: " not in shown
    assert "Unexpected error 3, x 2" in shown and "75.0" in shown
