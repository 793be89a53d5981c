"""Results of an evaluation: benchmarks, macro averages, the gap, their intervals; sources of streams; the sweep."""

import io
import json
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from memsearcher_jax.report.evaluation import show_results, summarize_evaluation
from memsearcher_jax.report.sweep import plot_sweep, show_sweep, sweep_row
from memsearcher_jax.types import StopReason, TrajectorySummary

SCORES = ("exact_match", "f1", "cover_exact_match", "precision", "recall")
TRAINED = ("nq", "hotpotqa")


def summary(dataset, value, *, turns=2, tokens=(100, 300), stop=StopReason.ANSWERED, **scores):
    every = dict.fromkeys(SCORES, value) | scores
    return TrajectorySummary(dataset, None, turns, turns - 1, stop, value, every, tokens)


def sample(dataset, correct, total):
    return [summary(dataset, float(number < correct)) for number in range(total)]


def stream(source, chunks, accuracy, **counts):
    scores = {"accuracy": accuracy, f"accuracy/{source}": accuracy, f"accuracy/{source}/event": accuracy / 2}
    counts = {"chunks": chunks, "stream_tokens": 100 * chunks, "memory_tokens": 0, "questions": 4, **counts}
    known = {} if math.isnan(accuracy) else scores
    return TrajectorySummary(source, None, chunks, 0, StopReason.STREAM_READ, accuracy, known, (), counts=counts)


SEVERAL = [*sample("nq", 30, 40), *sample("hotpotqa", 5, 10), *sample("musique", 1, 4), *sample("popqa", 0, 3)]
STREAMS = [
    stream("squad", 10, 0.5, memory_tokens=100, calls=4, calls_ok=2, calls_skipped=1, calls_failed=1),
    stream("squad", 10, 1.0, **{"memory_tokens": 300, "memory_tokens/semantic": 300, "calls/memory_update": 3}),
    stream("made", 10, 0.25, **{"calls": 5, "calls_failed": 5, "calls_failed/Unexpected error": 3}),
    stream("made", 130, math.nan, answers_failed=4, memory_tokens=14_000),
]


def printed(found, width=80, metrics=None, **judged):
    console = Console(file=io.StringIO(), width=width)
    show_results({"evaluation": found, "metrics": metrics or {}, **judged}, console)
    return console.file.getvalue()


def test_benchmarks_have_equal_weight_in_the_averages():
    found = summarize_evaluation(SEVERAL, in_distribution=TRAINED)
    counts = {name: one["questions"] for name, one in found["benchmarks"].items()}
    assert counts == {"nq": 40, "hotpotqa": 10, "musique": 4, "popqa": 3}
    alone = summarize_evaluation(sample("nq", 30, 40))
    assert found["benchmarks"]["nq"] == alone["benchmarks"]["nq"], "also its interval"
    means = {name: scores["f1"]["mean"] for name, scores in found["averages"].items()}
    assert means == pytest.approx({"macro": 0.375, "in_distribution": 0.625, "out_of_distribution": 0.125, "gap": 0.5})


def test_no_gap_without_both_distributions_and_no_average_of_one_benchmark():
    for chosen, trained_on in ((sample("nq", 1, 2), TRAINED), (SEVERAL, ()), (sample("", 1, 2), TRAINED)):
        assert list(summarize_evaluation(chosen, in_distribution=trained_on)["averages"]) == ["macro"]
    found = summarize_evaluation(sample("", 3, 8), in_distribution=TRAINED, default_dataset="encyclopedia")
    macro = found["averages"]["macro"]["f1"]
    assert macro == pytest.approx(found["benchmarks"]["encyclopedia"]["scores"]["f1"]) and macro["mean"] == 3 / 8
    assert not any(word in printed(found) for word in ("average", "distribution", "gap"))


def test_numbers_of_a_benchmark():
    some = [
        summary("nq", 1.0, turns=1, tokens=(100,), f1=0.5),
        summary("nq", 0.0, turns=3, tokens=(100, 400, 200), stop=StopReason.MAX_TURNS),
        summary("nq", 1.0, turns=0, tokens=(), stop=StopReason.CONTEXT_FULL),
        summary("nq", 0.0, turns=0, tokens=()),
    ]
    lost = TrajectorySummary("nq", None, 9, 9, StopReason.FAULT, math.nan, {}, ())
    found = summarize_evaluation([*some, lost])["benchmarks"]["nq"]
    assert (found["questions"], found["lost"], found["unscored"]) == (4, 1, 0)
    assert (found["scores"]["f1"]["mean"], found["scores"]["recall"]["mean"]) == (0.375, 0.5)
    assert (found["turns"], found["searches"], found["tokens_per_turn"], found["answered"]) == (1.0, 0.0, 200, 0.5)
    assert (found["mean_peak_context_tokens"], found["peak_context_tokens"]) == (125, 400)
    assert found["stops"] == {"answered": 0.5, "max_turns": 0.25, "context_full": 0.25}
    assert summarize_evaluation(some[3:])["benchmarks"]["nq"]["tokens_per_turn"] == 0.0
    for nothing in ([], [lost]):
        with pytest.raises(ValueError, match="has no questions"):
            summarize_evaluation(nothing)


def test_the_tables_fit_a_narrow_terminal():
    lines = printed(summarize_evaluation(SEVERAL, in_distribution=TRAINED)).splitlines()
    assert all(len(line) <= 80 for line in lines)
    (nq,) = (number for number, line in enumerate(lines) if line.startswith("nq ") and " 40 " in line)
    assert lines[nq].split() == ["nq", "40", *["75.0"] * 5]
    assert [word.count("–") for word in lines[nq + 1].split()] == [1] * 5
    for name, mean in (("gap", "50.0"), ("average", "37.5")):
        assert [line.split() for line in lines if line.startswith(name)] == [[name, *[mean] * 5]]
    popqa = next(number for number, line in enumerate(lines) if line.startswith("popqa"))
    assert lines[popqa + 1].split()[0] == "0.0–56.1", "Wilson's interval of 0 of 3"


def test_stop_reasons_are_printed_and_untrusted_names_are_escaped():
    some = [summary("[red]\x1b[2J", 1.0)] * 3 + [summary("[red]\x1b[2J", 0.0, stop=StopReason.MAX_TURNS)]
    output = printed(summarize_evaluation(some), width=160)
    assert "[red]\\x1b[2J: answered 75.0 %, max_turns 25.0 %" in output
    assert "\x1b[2J" not in output


def test_metrics_have_a_line_each_except_stop_reasons():
    metrics = {"exact_match": 0.12345, "wrong/misread": 0.1, "golden/any_held": 0.5, "test/f1/2_hops": 0.0}
    metrics |= {"generated_tokens": 9999.7, "stop/answered": 1.0, "stop/fault": 0.0}
    _, _, table = printed(summarize_evaluation(sample("nq", 1, 2)), metrics=metrics).partition("metric ")
    rows = [re.split("  +", line.strip()) for line in table.partition("\n\n")[0].splitlines()]
    assert rows == [
        ["value"],
        ["EM", "12.3 %"],
        ["wrong: all supporting pages were shown, or the data does not name them", "10.0 %"],
        ["golden answers: any in the new memory", "50.0 %"],
        ["test/f1/2 hops", "0.0 %"],
        ["generated tokens", "10,000"],
    ]


def test_what_a_judge_says_and_what_it_did_not():
    score = {"mean": 0.5, "low": 0.25, "high": 0.75}
    judge = {"nq": {"questions": 3, "unjudged": 1, "accuracy": score, "calibration_error": None}}
    judge["popqa"] = {"questions": 2, "unjudged": 2}
    lines = printed(summarize_evaluation(SEVERAL), width=120, judge=judge).splitlines()
    assert [line.split() for line in lines if line.startswith("nq ")][-1] == ["nq", "2", "50.0", *"––"]
    assert "nq: 1 answers were not judged, they enter no number; --resume asks again" in lines
    assert "popqa: 2 answers were not judged, the number is left out; --resume asks again" in lines


def test_streams_by_source_and_by_length():
    found = summarize_evaluation(STREAMS)
    json.dumps(found, allow_nan=False)
    squad, made = found["benchmarks"]["squad"], found["benchmarks"]["made"]
    assert list(found["by_length"]) == ["made, 10 chunks", "made, 130 chunks"]
    assert (squad["questions"], squad["scores"]["accuracy"]["mean"]) == (2, 0.75)
    assert (squad["stream_tokens"], squad["memory_tokens"], squad["memory_tokens/semantic"]) == (1_000, 200, 150)
    assert squad["compression"] == pytest.approx(0.8)
    assert [squad[f"calls_{name}_share"] for name in ("ok", "skipped", "failed")] == [0.5, 0.25, 0.25]
    assert "answered" not in squad and "searches" not in squad
    assert made["scores"]["accuracy"]["mean"] == 0.25, "a stream without a score is no zero"
    assert found["averages"]["macro"]["accuracy"]["mean"] == 0.5
    long = found["by_length"]["made, 130 chunks"]
    assert (long["unscored"], long["answers_failed"], long["scores"]) == (1, 4, {})
    assert "calls_ok_share" not in long, "it made no calls"
    assert long["compression"] == pytest.approx(1 - 14_000 / 13_000), "a memory may be longer than its stream"
    output = printed(found, width=120)
    assert "made, 130 chunks: stream_read 100.0 %, 1 without a score, 4 answers failed" in output
    assert "3 calls failed, Unexpected error" in output and "nan" not in output and "over streams" in output


def point(value, summaries):
    return sweep_row(value, {"evaluation": summarize_evaluation(summaries)})


def test_a_sweep_has_macro_averages_by_value(tmp_path):
    several = [*[summary("nq", 1.0, turns=1, tokens=(100,))] * 30, summary("popqa", 0.0, turns=3, tokens=(300,) * 3)]
    points = [point("x", several), point("512", sample("nq", 1, 5))]
    row = points[0]
    assert (row["value"], row["questions"], row["scores"]["f1"]["mean"], row["tokens_per_turn"]) == ("x", 31, 0.5, 200)
    assert (row["turns"], row["searches"], row["mean_peak_context_tokens"]) == (2, 1, 200)
    console = Console(file=io.StringIO(), width=80)
    show_sweep("agent.memory_tokens", points, console)
    lines = console.file.getvalue().rstrip().splitlines()
    assert all(len(line) <= 80 and "…" not in line for line in lines)
    assert lines[-1].split() == ["512", "5", "20.0", "20.0", "20.0", "2", "1", "200", "300"]
    plot_sweep(tmp_path / "sweep.png", "agent.$x$", [*points, point("_$\\bad$ \ud800", several)])
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_sweep_of_streams_may_have_a_value_without_a_score(tmp_path):
    points = [point("0.5", STREAMS), point("[b]", [replace(STREAMS[3], dataset="a, b")])]
    effort = {"stream_tokens": 4_000, "memory_tokens": 3_600, "compression": 0.4, "calls_ok_share": 0.25}
    assert {name: points[0][name] for name in effort} == pytest.approx(effort)
    console = Console(file=io.StringIO(), width=100)
    show_sweep("memalpha.reward.compression_weight", points, console)
    last = console.file.getvalue().rstrip().splitlines()[-1].split()
    assert last == ["[b]", "1", "?", "13,000", "14,000", "-7.7", "%", "–"]
    plot_sweep(tmp_path / "sweep.png", "x", points)
    mixed = [point("react", sample("nq", 1, 5)), points[0]]  # of workflow=react,memalpha
    show_sweep("workflow", mixed, console)
    plot_sweep(tmp_path / "sweep.png", "workflow", mixed)


def test_streams_by_type_of_question():
    found = summarize_evaluation(STREAMS)
    kinds = found["benchmarks"]["squad"]["types"]
    assert set(kinds) == {"event"} and kinds["event"]["streams"] == 2
    assert kinds["event"]["mean"] == pytest.approx(0.375)
    assert kinds["event"]["low"] <= 0.375 <= kinds["event"]["high"]
    assert "event" in printed(found) and found["benchmarks"]["made"]["types"]["event"]["streams"] == 1
    assert summarize_evaluation(SEVERAL)["benchmarks"]["nq"]["types"] == {}
    accuracies = {"accuracy": 0.5, "accuracy/a/b": 0.5, "accuracy/a/b/single/multi": 0.25, "accuracy/a/b/single": 1.0}
    with_slashes = replace(STREAMS[0], dataset="a/b", scores=accuracies)
    kinds = summarize_evaluation([with_slashes])["benchmarks"]["a/b"]["types"]
    assert {kind: score["mean"] for kind, score in kinds.items()} == {"single": 1.0, "single/multi": 0.25}
    assert "answers of squad are scored by label: a number\n" in printed(found, scored_by={"squad": "label: a number"})
    of_a_hub = summarize_evaluation([stream("[/b]/made", 10, 0.5)])
    assert set(of_a_hub["benchmarks"]["[/b]/made"]["types"]) == {"event"} and "[/b]/made  streams" in printed(of_a_hub)
