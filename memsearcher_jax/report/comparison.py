"""Paired comparison of two evaluations of the same questions. One may be another program's, see published_results.

All means are over the questions that both evaluations asked. A difference has a bootstrap interval and the p-value of a
sign-flip test, without correction for multiple metrics. Metrics with a slash are those of docs/evaluate.md.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from memsearcher_jax.logs.metric_names import MetricName
from memsearcher_jax.logs.trajectories import read_trajectories, summarize_trajectory
from memsearcher_jax.report.console import make_table, safe_text, shorten
from memsearcher_jax.report.evaluation import RESULTS_FILE, WEIGHTS_FILE, read_results
from memsearcher_jax.report.memory_quality import MemoryRules, memory_quality
from memsearcher_jax.report.published_results import ScoreAnswer, find_published, match_problems, read_published
from memsearcher_jax.report.statistics import CONFIDENCE_LEVEL, N_RESAMPLES, PairedComparison, paired_comparison
from memsearcher_jax.types import Problem, ScoredTrajectory, StopReason

MAX_QUESTION_CHARACTERS, MAX_ANSWER_CHARACTERS = 80, 32  # in the printed tables


@dataclass(frozen=True)
class AnsweredQuestion:
    """One question of an evaluation, without the tokens of its trajectory."""

    problem: Problem
    answer: str  # "" without an answer
    stop: StopReason
    scores: dict[str, float]  # greater is better
    metrics: dict[str, float]  # the scores and all other metrics

    def to_json(self) -> dict[str, Any]:
        return {"answer": self.answer, "stop": self.stop.value, "scores": self.scores}


@dataclass(frozen=True)
class FinishedEvaluation:
    folder: Path
    checkpoint: str
    step: int | None
    questions: dict[str, AnsweredQuestion]  # by id, in the order of the evaluation


@dataclass(frozen=True)
class EvaluationComparison:
    first: FinishedEvaluation
    second: FinishedEvaluation
    shared: list[str]  # ids of the questions of both, in the order of the first
    metrics: dict[str, PairedComparison]
    by: str
    won: list[str]  # ids that the second scores higher
    lost: list[str]

    def to_json(self) -> dict[str, Any]:
        """The comparison with the texts of the won and lost questions."""
        return {
            "first": self._side_json(self.first),
            "second": self._side_json(self.second),
            "shared": len(self.shared),
            "confidence_level": CONFIDENCE_LEVEL,
            "n_resamples": N_RESAMPLES,
            "metrics": {name: asdict(paired) for name, paired in self.metrics.items()},
            "by": self.by,
            "won": [self._question_json(id) for id in self.won],
            "lost": [self._question_json(id) for id in self.lost],
        }

    def _side_json(self, side: FinishedEvaluation) -> dict[str, Any]:
        shared = set(self.shared)
        return {
            "folder": str(side.folder),
            "checkpoint": side.checkpoint,
            "step": side.step,
            "questions": len(side.questions),
            "not_shared": [id for id in side.questions if id not in shared],
        }

    def _question_json(self, id: str) -> dict[str, Any]:
        problem = self.first.questions[id].problem
        return {
            "id": id,
            "question": problem.question,
            "golden_answers": problem.golden_answers,
            "first": self.first.questions[id].to_json(),
            "second": self.second.questions[id].to_json(),
        }


def read_evaluation(folder: Path, rules: MemoryRules) -> FinishedEvaluation:
    """Read a finished evaluation.

    Raises:
        FileNotFoundError, ValueError: the folder has no finished evaluation, is damaged, or repeats a question.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    if (folder / WEIGHTS_FILE).is_file() and not (folder / RESULTS_FILE).is_file():
        raise FileNotFoundError(f"{folder} is not finished: run launch/evaluate.py --resume --out {folder}")
    results = read_results(folder)
    questions: dict[str, AnsweredQuestion] = {}
    for shard in sorted((folder / "trajectories").glob("*.jsonl.gz")):
        for scored in read_trajectories(shard):
            if scored.trajectory.outcome.stop.is_fault:  # without a score, and not among the results' questions
                continue
            id = scored.trajectory.problem.id
            if id in questions:
                raise ValueError(f"{shard}: question {id!r} occurs twice: evaluate again")
            questions[id] = _answered_question(shard, scored, rules)
    if len(questions) != results.get("questions"):
        raise ValueError(
            f"{folder} is damaged: {RESULTS_FILE} counts {results.get('questions')} questions, but there are "
            f"trajectories of {len(questions)}: evaluate again"
        )
    return FinishedEvaluation(folder, str(results.get("checkpoint", "")), results.get("step"), questions)


def read_evaluations(
    first: Path, second: Path, rules: MemoryRules, score: ScoreAnswer
) -> tuple[FinishedEvaluation, FinishedEvaluation]:
    """Both sides, in order. Files of published results get the ids and golden answers of the other side.

    Raises like `read_evaluation` and `read_published`.
    """
    sides: dict[Path, FinishedEvaluation] = {}
    problems: list[Problem] = []
    published = {path: find_published(path) for path in (first, second)}
    # Files of published results come last: they have no ids of their own.
    for path in sorted(published, key=lambda path: published[path] is not None):
        file = published[path]
        sides[path] = _published_evaluation(file, problems, score) if file else read_evaluation(path, rules)
        problems = [question.problem for question in sides[path].questions.values()]
    return sides[first], sides[second]


def _published_evaluation(file: Path, problems: Sequence[Problem], score: ScoreAnswer) -> FinishedEvaluation:
    answers, questions = read_published(file), dict[str, AnsweredQuestion]()
    for row, problem in zip(answers, match_problems(answers, problems, file), strict=True):
        scores, answered = score(row.answer, problem.golden_answers), row.answer is not None
        metrics = {**scores, "answered": float(answered)}
        stop = StopReason.ANSWERED if answered else StopReason.NO_ANSWER
        questions[problem.id] = AnsweredQuestion(problem, row.answer or "", stop, scores, metrics)
    return FinishedEvaluation(file, "published results", None, questions)


def compare_evaluations(
    first: FinishedEvaluation, second: FinishedEvaluation, *, by: str, seed: int
) -> EvaluationComparison:
    """Compare by question id; the score `by` decides which questions are won.

    Raises:
        ValueError: no question is in both, an id names different questions, or `by` is not a score of both.
    """
    shared = [id for id in first.questions if id in second.questions]
    if not shared:
        raise ValueError(
            f"{first.folder} (questions {_some_ids(first)}) and {second.folder} (questions {_some_ids(second)}) share "
            "no question: compare evaluations of the same data"
        )
    pairs = [(first.questions[id], second.questions[id]) for id in shared]
    for a, b in pairs:
        if (a.problem.question, a.problem.golden_answers) != (b.problem.question, b.problem.golden_answers):
            raise ValueError(
                f"question {a.problem.id!r} is {shorten(a.problem.question, 60)!r} in {first.folder} and "
                f"{shorten(b.problem.question, 60)!r} in {second.folder}, or its golden answers differ: compare "
                "evaluations of the same data"
            )
    choices = dict.fromkeys(name for a, b in pairs for name in a.scores if name in b.scores)
    if by not in choices:
        raise ValueError(f"--by {by}: not a score of both evaluations; choose one of {', '.join(choices)}")
    scored = [(a, b) for a, b in pairs if by in a.scores and by in b.scores]
    return EvaluationComparison(
        first=first,
        second=second,
        shared=shared,
        metrics=_paired_metrics(pairs, seed),
        by=by,
        won=[a.problem.id for a, b in scored if b.scores[by] > a.scores[by]],
        lost=[a.problem.id for a, b in scored if b.scores[by] < a.scores[by]],
    )


def show_comparison(comparison: EvaluationComparison, console: Console, *, max_questions: int) -> None:
    """Print the table of metrics, then at most `max_questions` each of the won and the lost questions."""
    first, second = comparison.first, comparison.second
    for letter, side in (("A", first), ("B", second)):
        step = "" if side.step is None else f", step {side.step}"
        console.print(Text(f"{letter}  ").append_text(safe_text(f"{side.folder}: {side.checkpoint}{step}")))
    counts = f"{len(comparison.shared):,} shared of {len(first.questions):,} and {len(second.questions):,}"
    console.print(f"questions: {counts}\n")
    table = make_table("metric", "n", "A", "B", "B − A", "interval", "p")
    for name, paired in comparison.metrics.items():
        difference = paired.difference
        table.add_row(
            safe_text(name.replace("_", " ")),
            f"{paired.count:,}",
            _format(paired.first),
            _format(paired.second),
            f"{'+' if difference.mean > 0 else ''}{_format(difference.mean)}",
            Text(f"[{_format(difference.low)}, {_format(difference.high)}]"),  # not console markup
            "<0.0001" if paired.p_value < 1e-4 else f"{paired.p_value:.4f}",
        )
    console.print(table)
    console.print(f"\nintervals: {CONFIDENCE_LEVEL:.0%} bootstrap; p: two-sided sign-flip test, uncorrected")
    for title, ids in (("won", comparison.won), ("lost", comparison.lost)):
        console.print()
        console.print(Text(f"{title} by B in {comparison.by}: {len(ids):,}", style="bold"))
        columns = ("question", "golden", "A", "B")
        table = make_table("id", *columns, left=columns)
        for id in ids[:max_questions]:
            problem = first.questions[id].problem
            table.add_row(
                safe_text(shorten(id, MAX_ANSWER_CHARACTERS)),
                safe_text(shorten(problem.question, MAX_QUESTION_CHARACTERS)),
                safe_text(shorten(" | ".join(problem.golden_answers), MAX_ANSWER_CHARACTERS)),
                _answer_cell(first.questions[id]),
                _answer_cell(second.questions[id]),
            )
        if table.row_count:
            console.print(table)
        if len(ids) > max_questions:
            console.print(f"… {len(ids) - max_questions:,} more: --show {len(ids)}, or --json FILE for all")


def _answered_question(shard: Path, scored: ScoredTrajectory, rules: MemoryRules) -> AnsweredQuestion:
    summary, problem = summarize_trajectory(scored), scored.trajectory.problem
    lengths = summary.context_lengths
    scores = {**scored.scores, str(MetricName.REWARD): scored.reward}
    if problem.stream:  # it lacks scores if it was not read to its end, or if its questions were not answered
        scores = {name: value for name, value in scores.items() if not math.isnan(value)}
    metrics = {
        **scores,
        "answered": float(summary.stop is StopReason.ANSWERED),
        str(MetricName.TURNS): float(summary.turns),
        "searches": float(summary.searches),
        **({str(MetricName.TOKENS_PER_TURN): float(np.mean(lengths))} if lengths else {}),
        "peak_context_tokens": float(max(lengths, default=0)),
        **{name: float(count) for name, count in summary.counts.items()},
        **memory_quality(scored.trajectory, rules).means,
    }
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise ValueError(f"{shard}: {name} of question {problem.id!r} is {value}: evaluate again")
    return AnsweredQuestion(problem, scored.trajectory.outcome.answer, summary.stop, scores, metrics)


def _paired_metrics(
    pairs: Sequence[tuple[AnsweredQuestion, AnsweredQuestion]], seed: int
) -> dict[str, PairedComparison]:
    """Every metric over the pairs in which both sides have it; without metrics that no pair has."""
    compared = {}
    for name in dict.fromkeys(name for first, _ in pairs for name in first.metrics):
        both = [pair for pair in pairs if all(name in side.metrics for side in pair)]
        if both:
            # Each metric has its own generator, so its numbers do not depend on the other metrics.
            rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
            value_PE = np.array([[side.metrics[name] for side in pair] for pair in both])
            compared[name] = paired_comparison(value_PE[:, 0], value_PE[:, 1], rng)
    return compared


def _answer_cell(question: AnsweredQuestion) -> Text:
    """The answer, or the stop reason in dim type."""
    if question.stop is StopReason.ANSWERED:
        return safe_text(shorten(question.answer, MAX_ANSWER_CHARACTERS))
    return Text(question.stop.value, style="dim")


def _some_ids(evaluation: FinishedEvaluation) -> str:
    """The first ids, for an error message."""
    ids = list(evaluation.questions)
    return ", ".join(ids[:2]) + (", …" if len(ids) > 2 else "") if ids else "none"


def _format(value: float) -> str:
    return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.1f}"
