"""Results of an evaluation: per benchmark, macro average, in- and out-of-distribution, as data and as tables.

The streams of Mem-alpha have the same results: a source of streams is a benchmark, and the score of a stream is the
mean over its questions. Means have intervals over questions, or streams (report/statistics.py). An average over
benchmarks is a macro average: each benchmark has the same weight, whatever its number of questions. Its interval
follows from those of the benchmarks, for a fixed choice of benchmarks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from memsearcher_jax.logs.metric_names import STOP_PREFIX
from memsearcher_jax.report.console import make_table, safe_text
from memsearcher_jax.report.labels import format_metric, label, percent
from memsearcher_jax.report.memory_quality import metric_columns
from memsearcher_jax.report.statistics import (
    CONFIDENCE_LEVEL,
    Interval,
    combined_interval,
    mean,
    mean_interval,
    named_rng,
)
from memsearcher_jax.types import StopReason, TrajectorySummary

SCORES = ("exact_match", "f1", "cover_exact_match", "precision", "recall", "accuracy", "evidence_recall")
"""The scores of an answer and, last, of a stream."""
EFFORT = ("turns", "searches", "tokens_per_turn", "mean_peak_context_tokens", "peak_context_tokens", "memory_tokens")
"""The cost of an answer or of reading a stream."""
MEMORY = ("stream_tokens", "memory_tokens/core", "memory_tokens/semantic", "memory_tokens/episodic", "compression")
"""Of the memory that a stream became; compression is 1 - memory / stream, over all streams."""
CALLS = ("calls", "calls_ok_share", "calls_skipped_share", "calls_failed_share")
SHOWN = (*SCORES, "reward", "answered", *EFFORT, *MEMORY, *CALLS)
JUDGED = ("accuracy", "agreement_with_exact_match", "calibration_error")
MIN_STOP_FRACTION = 0.005  # rarer stop reasons are not printed


def numbers_of(summary: TrajectorySummary) -> dict[str, float]:
    """All numbers of one trajectory, without those that it does not have. Streams have no answer and no searches."""
    numbers: dict[str, float] = {name: value for name, value in summary.scores.items() if not math.isnan(value)}
    if not math.isnan(summary.reward):
        numbers["reward"] = summary.reward
    reads_stream = "stream_tokens" in summary.counts
    if not reads_stream:
        numbers["answered"] = summary.stop is StopReason.ANSWERED
        numbers["searches"] = summary.searches
    numbers["turns"] = summary.turns
    if summary.context_lengths:
        numbers["tokens_per_turn"] = mean(summary.context_lengths)
    numbers["mean_peak_context_tokens"] = max(summary.context_lengths, default=0)  # of several trajectories the mean
    numbers |= summary.counts
    return {name: float(value) for name, value in numbers.items()}


def summarize(summaries: Sequence[TrajectorySummary]) -> dict[str, float]:
    """Means over the trajectories that were not lost and have a number (tokens per turn: over turns), first of `SHOWN`.

    A count that only some trajectories have is 0 for the others. A mean that is not known is absent.
    """
    summaries = [summary for summary in summaries if not summary.stop.is_fault]
    no_counts = dict.fromkeys((name for summary in summaries for name in summary.counts), 0.0)
    columns = metric_columns(no_counts | numbers_of(summary) for summary in summaries)
    means = {name: mean(values) for name, values in columns.items()}
    if "stream_tokens" in means:
        means = {name: value for name, value in means.items() if name not in ("answered", "searches")}
        means["compression"] = 1 - means["memory_tokens"] / (means["stream_tokens"] or math.nan)
        for outcome in ("calls_ok", "calls_skipped", "calls_failed"):
            means[f"{outcome}_share"] = means.get(outcome, 0.0) / (means.get("calls") or math.nan)
    lengths = [tokens for summary in summaries for tokens in summary.context_lengths]
    means["tokens_per_turn"] = mean(lengths) if lengths else 0.0
    means["peak_context_tokens"] = float(max(lengths, default=0))
    return {name: means[name] for name in (*SHOWN, *means) if not math.isnan(means.get(name, math.nan))}


def summarize_evaluation(
    summaries: Sequence[TrajectorySummary],
    *,
    in_distribution: Collection[str] = (),
    default_dataset: str = "questions",
    seed: int = 0,
) -> dict[str, Any]:
    """The results of an evaluation, as JSON values; a number that is not known is absent.

        {"benchmarks": {name: {"questions": those that were not lost to faults, on which all numbers but `lost` are,
                               "scores": {score: {"mean", "low", "high"}}, the means of `summarize`,
                               "types": {type of question: {"streams", "mean", "low", "high"}}, of streams,
                               "stops": {stop reason: fraction, the most frequent first},
                               "unscored": such as streams that were not read to their end, "lost"}},
         "by_length": the same for the streams of each length, of a source whose streams differ in length,
         "averages": {"macro", "in_distribution", "out_of_distribution", "gap": {score: {"mean", "low", "high"}}}}

    `gap` is in-distribution minus out-of-distribution; these three are absent if one of the two is empty.

    Args:
      summaries: one per question; `dataset` names the benchmark.
      in_distribution: names of the benchmarks that the policy was trained on.
      default_dataset: name of the benchmark of questions without one.
      seed: of the resampling. Each benchmark has its own generator, so its intervals do not depend on the others.

    Raises:
      ValueError: there are no questions, or none that was not lost.
    """
    lost = Counter(summary.dataset or default_dataset for summary in summaries if summary.stop.is_fault)
    groups: dict[str, list[TrajectorySummary]] = {}
    for summary in summaries:
        if not summary.stop.is_fault:
            groups.setdefault(summary.dataset or default_dataset, []).append(summary)
    if not groups:
        raise ValueError(f"the evaluation has no questions besides {lost.total()} that were lost to faults")
    by_length: dict[str, list[TrajectorySummary]] = {}
    for name, group in groups.items():
        lengths = {summary.counts.get("chunks", 0) for summary in group}
        if len(lengths) > 1:
            for chunks in sorted(lengths):
                same_length = [summary for summary in group if summary.counts.get("chunks", 0) == chunks]
                by_length[f"{name}, {chunks} chunks"] = same_length
    benchmarks = {name: _benchmark_json(name, group, seed, lost[name]) for name, group in groups.items()}
    averages = {"macro": _average(benchmarks.values())}
    seen = [benchmark for name, benchmark in benchmarks.items() if name in in_distribution]
    unseen = [benchmark for name, benchmark in benchmarks.items() if name not in in_distribution]
    if seen and unseen:
        of_seen = _average(seen)
        of_unseen = _average(unseen)
        averages["in_distribution"] = of_seen
        averages["out_of_distribution"] = of_unseen
        averages["gap"] = {
            score: combined_interval((of_seen[score], of_unseen[score]), (1, -1))
            for score in of_seen
            if score in of_unseen
        }
    averages_json = {}
    for name, scores in averages.items():
        averages_json[name] = {score: asdict(interval) for score, interval in scores.items()}
    by_length_json = {name: _benchmark_json(name, group, seed) for name, group in by_length.items()}
    return {"benchmarks": benchmarks, "by_length": by_length_json, "averages": averages_json}


Cell = str | tuple[str, str, str]
"""A label or a number, or of a score (mean, low, high)."""


@dataclass(frozen=True)
class ResultTable:
    """A table of results, for the terminal and the page; the first cell of each row is its label."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


def result_tables(results: Mapping[str, Any]) -> list[ResultTable]:
    """The tables of an evaluation's results.json.

    Scores by benchmark, average and type of question, with intervals; turns and tokens; memory and tool calls; what a
    judge of short answers says.
    """
    evaluation = results["evaluation"]
    groups = evaluation["benchmarks"] | evaluation["by_length"]
    averages = dict(evaluation["averages"])
    if len(evaluation["benchmarks"]) == 1:
        averages.pop("macro")
    names = [name for name in SCORES if any(name in group["scores"] for group in groups.values())]
    rows = [_row(name, f"{group['questions']:,}", group["scores"], names) for name, group in groups.items()]
    rows += [_row(label(name), "", scores, names) for name, scores in averages.items()]
    unit = "streams" if any("stream_tokens" in group for group in groups.values()) else "questions"
    note = f"percent, with the {CONFIDENCE_LEVEL:.0%} interval over {unit}"
    tables = [ResultTable("Benchmarks", ("benchmark", unit, *map(label, names)), rows, note)]
    for name, group in groups.items():
        if group["types"]:
            rows = [_row(kind, f"{score['streams']:,}", {"": score}, [""]) for kind, score in group["types"].items()]
            tables.append(ResultTable(f"Types of questions of {name}", (name, "streams", "accuracy"), rows))
    for title, columns in (("Cost", EFFORT), ("Memory", MEMORY), ("Tool calls", CALLS)):
        means = means_table(title, columns, groups)
        has_columns = len(means.columns) > 1
        if has_columns:
            tables.append(means)
    if judged := results.get("judge"):
        rows = []
        for name, verdicts in judged.items():
            number = verdicts["questions"] - verdicts["unjudged"]
            rows.append(_row(name, f"{number:,}", verdicts, JUDGED))
        tables.append(ResultTable("Answers, judged", ("benchmark", "judged", *map(label, JUDGED)), rows, "percent"))
    return tables


def means_table(title: str, names: Iterable[str], groups: Mapping[str, Mapping[str, Any]]) -> ResultTable:
    """Those of the means `names` that any of the groups has."""
    known = [name for name in names if any(name in means for means in groups.values())]
    rows: list[list[Cell]] = []
    for group, means in groups.items():
        rows.append([group, *(format_metric(name, means.get(name, math.nan), 3) for name in known)])
    return ResultTable(title, ("benchmark", *map(label, known)), rows)


def metrics_table(metrics: Mapping[str, Mapping[str, float]]) -> ResultTable:
    """The metrics of one evaluation, or of two by their names with the second minus the first.

    Stop reasons are shown apart.
    """
    rows: list[list[Cell]] = []
    names = dict.fromkeys(name for values in metrics.values() for name in values)
    for name in names:
        if name.startswith(STOP_PREFIX):
            continue
        values = [values_of_side.get(name, math.nan) for values_of_side in metrics.values()]
        if len(values) == 2:
            values.append(values[1] - values[0])
        rows.append([label(name), *(format_metric(name, value) for value in values)])
    columns = ["metric", *metrics]
    if len(metrics) == 2:
        first, second = metrics
        columns.append(f"{second} − {first}")
    return ResultTable("Metrics", columns, rows)


def show_results(results: Mapping[str, Any], console: Console) -> None:
    """Print all tables, how the trajectories ended, and what went wrong."""
    for table in (*result_tables(results), metrics_table({"value": results["metrics"]})):
        show_table(table, console)
    evaluation = results["evaluation"]
    for group, result in (evaluation["benchmarks"] | evaluation["by_length"]).items():
        console.print(safe_text(f"{group}: {', '.join(_remarks(result))}"))
    for source, rule in results.get("scored_by", {}).items():
        console.print(safe_text(f"answers of {source} are scored by {rule}"))
    for name, verdicts in results.get("judge", {}).items():
        if verdicts["unjudged"]:
            left_out = "they enter no number" if "accuracy" in verdicts else "the number is left out"
            line = f"{name}: {verdicts['unjudged']:,} answers were not judged, {left_out}; --resume asks again"
            console.print(safe_text(line))


def show_table(table: ResultTable, console: Console) -> None:
    first, *others = table.columns
    shown = make_table(first, *(name.replace(" ", "\n", 1) for name in others))
    for name, *cells in table.rows:
        shown.add_row(safe_text(str(name)), *map(_cell_text, cells))
    console.print(shown)
    console.print(Text(f"{table.note}\n" if table.note else "", style="dim"))


def _cell_text(cell: Cell) -> str | Text:
    if isinstance(cell, str):
        return cell
    mean_value, low, high = cell
    return Text.assemble(mean_value, (f"\n{low}–{high}", "dim"))


def _row(name: str, count: str, scores: Mapping[str, Any], columns: Iterable[str]) -> list[Cell]:
    """Fractions in percent, or scores with their intervals; a dash where one is not known."""
    cells: list[Cell] = [name, count]
    for score in map(scores.get, columns):
        if isinstance(score, Mapping):
            cells.append((percent(score["mean"]), percent(score["low"]), percent(score["high"])))
        else:
            cells.append("–" if score is None else percent(score))
    return cells


def _remarks(result: Mapping[str, Any]) -> list[str]:
    """The stop reasons, and what went wrong."""
    counts = {"without a score": result["unscored"], "lost": result["lost"]}
    for name, mean_count in result.items():
        if name == "answers_failed" or name.startswith("calls_failed/"):
            counts[name.replace("_", " ").replace("/", ", ")] = round(mean_count * result["questions"])
    stops = [f"{stop} {percent(share)} %" for stop, share in result["stops"].items() if share >= MIN_STOP_FRACTION]
    return stops + [f"{count:,} {name}" for name, count in counts.items() if count]


def _benchmark_json(name: str, group: Sequence[TrajectorySummary], seed: int, lost: int = 0) -> dict[str, Any]:
    """`types`: the accuracy of each type of question, which a stream's data set names in `accuracy/SOURCE/TYPE`."""
    columns = metric_columns(map(numbers_of, group))
    accuracies = [metric for metric in columns if metric.startswith("accuracy/")]
    # A source and a type may have slashes of their own: the source is the name that all others extend.
    sources = [metric for metric in accuracies if not any(metric.startswith(f"{other}/") for other in accuracies)]
    types = {
        metric.removeprefix(f"{source}/"): metric
        for source in sources
        for metric in sorted(accuracies)
        if metric.startswith(f"{source}/")
    }
    stops = Counter(summary.stop.value for summary in group)

    def interval(score: str) -> dict[str, float]:
        return asdict(mean_interval(columns[score], named_rng(seed, name)))

    return {
        **summarize(group),
        "questions": len(group),
        "scores": {score: interval(score) for score in SCORES if score in columns},
        "types": {kind: {"streams": len(columns[metric]), **interval(metric)} for kind, metric in types.items()},
        "stops": {stop: count / len(group) for stop, count in stops.most_common()},
        "unscored": sum(math.isnan(summary.reward) for summary in group),
        "lost": lost,
    }


def _average(benchmarks: Collection[Mapping[str, Any]]) -> dict[str, Interval]:
    """Of each score the mean over the benchmarks that have it."""
    scores: dict[str, list[Interval]] = {}
    for benchmark in benchmarks:
        for score, interval in benchmark["scores"].items():
            scores.setdefault(score, []).append(Interval(**interval))
    return {score: combined_interval(group, [1 / len(group)] * len(group)) for score, group in scores.items()}
