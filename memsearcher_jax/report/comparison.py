"""Paired comparison of two evaluations of the same questions.

All means are over the questions that both evaluations asked. A difference has a bootstrap interval and the p-value of a
sign test, without correction for multiple metrics. Metrics with a slash are those of docs/evaluate.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from memsearcher_jax.jsonl import flatten
from memsearcher_jax.logs.run_facts import RESULTS_FILE, WEIGHTS_FILE, read_facts, read_results
from memsearcher_jax.logs.trajectories import HOST_FILES, read_trajectories, summarize_trajectory
from memsearcher_jax.report.console import make_table, safe_text, shorten
from memsearcher_jax.report.evaluation import Cell, ResultTable, numbers_of
from memsearcher_jax.report.labels import format_metric, label
from memsearcher_jax.report.memory_quality import memory_quality, metric_columns
from memsearcher_jax.report.statistics import CONFIDENCE_LEVEL, mean, paired_comparison
from memsearcher_jax.types import Problem, StopReason

MAX_QUESTIONS = 10  # of a printed table
MAX_CHARACTERS = 60  # of a text in it


@dataclass(frozen=True)
class AnsweredQuestion:
    """One question of an evaluation, without the tokens of its trajectory."""

    problem: Problem
    result: dict[str, Any]  # as JSON: "answer", "stop", and "scores", of which greater is better
    metrics: dict[str, float]  # the scores and all other metrics


@dataclass(frozen=True)
class QuestionPair:
    """One question in two evaluations."""

    first: AnsweredQuestion
    second: AnsweredQuestion

    def shared_scores(self) -> list[str]:
        return [name for name in self.first.result["scores"] if name in self.second.result["scores"]]

    def shared_metrics(self) -> list[str]:
        return [name for name in self.first.metrics if name in self.second.metrics]

    def gain(self, metric: str) -> float:
        """Second minus first; NaN where one of them does not have the metric."""
        return self.second.metrics.get(metric, math.nan) - self.first.metrics.get(metric, math.nan)

    def to_json(self) -> dict[str, Any]:
        problem = self.first.problem
        return {
            "id": problem.id,
            "question": problem.question,
            "golden_answers": problem.golden_answers,
            "first": self.first.result,
            "second": self.second.result,
        }


@dataclass(frozen=True)
class FinishedEvaluation:
    folder: Path
    results: dict[str, Any]
    questions: dict[str, AnsweredQuestion]  # by id, in the order of the evaluation
    settings: dict[str, Any]  # by their dotted names


def read_evaluation(folder: Path) -> FinishedEvaluation:
    """Read a finished evaluation.

    Raises:
        FileNotFoundError, ValueError: the folder has no finished evaluation, or is damaged.
    """
    if not (folder / WEIGHTS_FILE).is_file():
        raise FileNotFoundError(f"{folder} holds no evaluation: name a folder that launch/evaluate.py wrote")
    results = read_results(folder)
    questions: dict[str, AnsweredQuestion] = {}
    counts = set[str]()  # a trajectory without one of them has 0, as in the results
    for file in sorted((folder / "trajectories").glob(HOST_FILES)):
        for scored in read_trajectories(file):
            problem = scored.trajectory.problem
            outcome = scored.trajectory.outcome
            if outcome.stop.is_fault:  # without a score, and not among the results' questions
                continue
            numbers = numbers_of(summarize_trajectory(scored))
            counts.update(outcome.counts)
            scores = {name: numbers[name] for name in (*scored.scores, "reward") if name in numbers}
            turns = metric_columns(turn.metrics for turn in memory_quality(scored.trajectory))
            metrics = numbers | {name: mean(values) for name, values in turns.items()}
            result = {"answer": outcome.answer, "stop": outcome.stop.value, "scores": scores}
            questions[problem.id] = AnsweredQuestion(problem, result, metrics)
    for question in questions.values():
        question.metrics.update(dict.fromkeys(counts - question.metrics.keys(), 0.0))
    if len(questions) != results.get("questions"):
        raise ValueError(
            f"{folder} is damaged: {RESULTS_FILE} counts {results.get('questions')} questions, but there are "
            f"trajectories of {len(questions)}: evaluate again"
        )
    return FinishedEvaluation(folder, results, questions, flatten(read_facts(folder).settings))


def compare_evaluations(first: FinishedEvaluation, second: FinishedEvaluation) -> dict[str, Any]:
    """Compare by question id. The first score that both have decides which questions are won.

    Returns JSON values: both sides, the `PairedComparison` of each metric, the questions that the second won and lost
    with both answers, and the settings that differ.

    Raises:
        ValueError: no question is in both, an id names different questions, or no score is in both.
    """
    pairs = [
        QuestionPair(question, second.questions[id])
        for id, question in first.questions.items()
        if id in second.questions
    ]
    if not pairs:
        sides = [f"{side.folder} (questions {', '.join([*side.questions][:2])}, …)" for side in (first, second)]
        raise ValueError(f"{' and '.join(sides)} share no question: compare evaluations of the same data")
    for pair in pairs:
        ours = pair.first.problem
        theirs = pair.second.problem
        if (ours.question, ours.golden, ours.stream) != (theirs.question, theirs.golden, theirs.stream):
            raise ValueError(
                f"question {ours.id!r} is {shorten(ours.question, 60)!r} in {first.folder} and "
                f"{shorten(theirs.question, 60)!r} in {second.folder}, or its golden answers or texts differ: compare "
                "evaluations of the same data"
            )
    decisive = next((name for pair in pairs for name in pair.shared_scores()), "")
    if not decisive:
        raise ValueError(f"{first.folder} and {second.folder} have no score in common: compare agents of one kind")
    metrics = {}
    for name in dict.fromkeys(name for pair in pairs for name in pair.shared_metrics()):
        values = [
            (pair.first.metrics[name], pair.second.metrics[name])
            for pair in pairs
            if name in pair.first.metrics and name in pair.second.metrics
        ]
        metrics[name] = asdict(paired_comparison(values, np.random.default_rng(0)))
    won = [pair.to_json() for pair in pairs if pair.gain(decisive) > 0]
    lost = [pair.to_json() for pair in pairs if pair.gain(decisive) < 0]
    names = sorted(first.settings | second.settings)
    settings = {
        name: {"first": first.settings.get(name), "second": second.settings.get(name)}
        for name in names
        if first.settings.get(name) != second.settings.get(name)
    }
    return {
        "first": _side_json(first, second),
        "second": _side_json(second, first),
        "shared": len(pairs),
        "metrics": metrics,
        "by": decisive,
        "won": won,
        "lost": lost,
        "settings": settings,
    }


def comparison_table(metrics: Mapping[str, Any], first: str, second: str) -> ResultTable:
    """The paired comparison of each metric, as `compare_evaluations` returns them, with the names of both sides."""
    rows: list[list[Cell]] = []
    for name, paired in metrics.items():
        difference = paired["difference"]
        sign = "+" if difference["mean"] > 0 else ""
        rows.append(
            [
                label(name),
                f"{paired['count']:,}",
                format_metric(name, paired["first"]),
                format_metric(name, paired["second"]),
                sign + format_metric(name, difference["mean"]),
                f"{format_metric(name, difference['low'])} to {format_metric(name, difference['high'])}",
                "<0.0001" if paired["p_value"] < 1e-4 else f"{paired['p_value']:.4f}",
            ]
        )
    columns = ("metric", "n", first, second, f"{second} − {first}", "interval", "p")
    note = f"intervals: {CONFIDENCE_LEVEL:.0%} bootstrap; p: two-sided sign test, uncorrected"
    return ResultTable("Paired comparison over the questions of both", columns, rows, note)


def show_comparison(comparison: Mapping[str, Any], console: Console) -> None:
    """Print the table of metrics, the settings that differ, and the questions that were won and lost.

    Of each of the latter at most `MAX_QUESTIONS`.
    """
    sides = comparison["first"], comparison["second"]
    for letter, side in zip("AB", sides, strict=True):
        step = "" if side["step"] is None else f", step {side['step']}"
        console.print(safe_text(f"{letter}  {side['folder']}: {side['checkpoint']}{step}"))
    counts = [f"{side['questions']:,}" for side in sides]
    console.print(f"questions: {comparison['shared']:,} shared of {' and '.join(counts)}\n")
    paired = comparison_table(comparison["metrics"], "A", "B")
    table = make_table(*paired.columns)
    for name, *cells in paired.rows:
        table.add_row(safe_text(str(name)), *map(str, cells))
    console.print(table)
    console.print(f"\n{paired.note}")
    if comparison["settings"]:
        table = make_table("setting that differs", "A", "B", left=("A", "B"))
        for name, values in comparison["settings"].items():
            table.add_row(*(safe_text(shorten(str(text), MAX_CHARACTERS)) for text in (name, *values.values())))
        console.print("", table)
    for title in ("won", "lost"):
        questions = comparison[title]
        console.print(Text(f"\n{title} by B in {comparison['by']}: {len(questions):,}", style="bold"))
        columns = ("question", "golden", "A", "B")
        table = make_table("id", *columns, left=columns)
        for question in questions[:MAX_QUESTIONS]:
            texts = [question["id"], question["question"], " | ".join(question["golden_answers"])]
            for side in (question["first"], question["second"]):
                texts.append(side["answer"] if side["stop"] == StopReason.ANSWERED.value else f"({side['stop']})")
            table.add_row(*(safe_text(shorten(text, MAX_CHARACTERS)) for text in texts))
        if table.row_count:
            console.print(table)
        if len(questions) > MAX_QUESTIONS:
            console.print(f"… {len(questions) - MAX_QUESTIONS:,} more: --json FILE has all")


def _side_json(side: FinishedEvaluation, other: FinishedEvaluation) -> dict[str, Any]:
    return {
        "folder": str(side.folder),
        "checkpoint": str(side.results.get("checkpoint", "")),
        "step": side.results.get("step"),
        "questions": len(side.questions),
        "not_shared": [id for id in side.questions if id not in other.questions],
    }
