"""Compares two evaluations of the same questions: paired differences, and the questions won and lost.

python launch/compare.py runs/A runs/B                 # B against A: positive differences are B's gain
python launch/compare.py runs/A runs/B --by f1 --json FILE

Every number is a mean over the questions that both evaluations asked. Its difference has a bootstrap interval and the
p-value of a sign-flip test (report/intervals.py); each p-value is for its metric alone, not corrected for their number.
Metrics with a slash are those of docs/memory_quality.md.
"""

from __future__ import annotations

import argparse
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cli
import numpy as np
from evaluate import WEIGHTS_FILE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memsearcher_jax.agent.types import Problem, Stop
from memsearcher_jax.jsonl import parse_object
from memsearcher_jax.report.console import plain, shorten
from memsearcher_jax.report.intervals import DRAWS, LEVEL, Paired, paired_difference
from memsearcher_jax.report.memory_quality import memory_quality
from memsearcher_jax.report.names import Name
from memsearcher_jax.report.page_facts import tokens_of_turns
from memsearcher_jax.report.trajectories import Scored, read_trajectories

RESULTS_FILE = "results.json"
QUESTION_CHARACTERS, ANSWER_CHARACTERS = 80, 32


@dataclass(frozen=True)
class Asked:
    """One question of an evaluation, without the tokens of its trajectory."""

    problem: Problem
    answer: str  # "" where it did not answer
    stop: Stop
    scores: dict[str, float]  # greater is better
    metrics: dict[str, float]  # the scores and all else


@dataclass(frozen=True)
class Evaluation:
    folder: Path
    checkpoint: str
    step: int | None
    asked: dict[str, Asked]  # by the question's id, in the order of the evaluation


@dataclass(frozen=True)
class Comparison:
    """What two evaluations say about the questions that both asked."""

    first: Evaluation
    second: Evaluation
    shared: list[str]  # ids, in the order of the first
    metrics: dict[str, Paired]
    by: str
    won: list[str]  # ids that the second scores higher
    lost: list[str]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = cli.Parser(
        prog="compare.py", description="Compare two evaluations of the same questions.", allow_abbrev=False
    )
    parser.add_argument("first", metavar="RUN_A", type=Path, help="folder that launch/evaluate.py wrote")
    parser.add_argument("second", metavar="RUN_B", type=Path, help="another; positive differences are its gain")
    parser.add_argument(
        "--by", metavar="METRIC", default=str(Name.EXACT_MATCH), help="what wins a question (%(default)s)"
    )
    parser.add_argument("--show", metavar="N", type=int, default=10, help="most won and lost questions to print (10)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the resampling (0)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the result to this file, as JSON")
    flags = parser.parse_args(argv)
    for name in ("show", "seed"):
        if getattr(flags, name) < 0:
            raise ValueError(f"--{name} {getattr(flags, name)}: it must be at least 0")
    if flags.json and flags.json.is_dir():
        raise IsADirectoryError(f"--json {flags.json} is a folder: name a file")
    return flags


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = parse(argv)
        found = compare(read_evaluation(flags.first), read_evaluation(flags.second), by=flags.by, seed=flags.seed)
        try:
            cli.write_json(flags.json, to_json(found) | {"seed": flags.seed})
        except OSError as error:
            raise OSError(f"--json {flags.json} cannot be written ({error.strerror}): name another file") from error
    show(found, Console(highlight=False), most=flags.show)


def read_evaluation(folder: Path) -> Evaluation:
    """An evaluation that has ended.

    Raises:
        FileNotFoundError, ValueError: the folder is none, is damaged, or asks a question twice; in one line.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    file = folder / RESULTS_FILE
    if not file.is_file():
        if (folder / WEIGHTS_FILE).is_file():
            raise FileNotFoundError(f"{folder} has not ended: go on with launch/evaluate.py --resume --out {folder}")
        raise FileNotFoundError(
            f"{folder} holds no evaluation: there is no {RESULTS_FILE} in it; launch/evaluate.py makes one"
        )
    results = parse_object(str(file), file.read_bytes())
    asked: dict[str, Asked] = {}
    for part in sorted((folder / "trajectories").glob("*.jsonl.gz")):
        for scored in read_trajectories(part):
            id = scored.trajectory.problem.id
            if id in asked:
                raise ValueError(f"{part}: question {id!r} was asked before: an evaluation asks each once")
            asked[id] = _asked(part, scored)
    if len(asked) != results.get("questions"):
        raise ValueError(
            f"{folder} is damaged: {RESULTS_FILE} counts {results.get('questions')} questions, its trajectories are of "
            f"{len(asked)}; evaluate again"
        )
    return Evaluation(folder, str(results.get("checkpoint", "")), results.get("step"), asked)


def compare(first: Evaluation, second: Evaluation, *, by: str, seed: int) -> Comparison:
    """Pairs the questions by id. Raises ValueError if none is in both, or if an id names different questions."""
    shared = [id for id in first.asked if id in second.asked]
    if not shared:
        raise ValueError(
            f"{first.folder} and {second.folder} share no question (one asks {_some(first)}; the other "
            f"{_some(second)}): compare evaluations of the same data"
        )
    pairs = [(first.asked[id], second.asked[id]) for id in shared]
    for one, other in pairs:
        if _content(one.problem) != _content(other.problem):
            raise ValueError(
                f"question {one.problem.id!r} is {shorten(one.problem.question, 60)!r} in {first.folder} and "
                f"{shorten(other.problem.question, 60)!r} in {second.folder}, or its golden answers differ: compare "
                "evaluations of the same data"
            )
    choices = [name for name in pairs[0][0].scores if all(name in side.scores for pair in pairs for side in pair)]
    if by not in choices:
        raise ValueError(f"--by {by}: no score of both evaluations; choose one of {', '.join(choices)}")
    return Comparison(
        first=first,
        second=second,
        shared=shared,
        metrics=_paired_metrics(pairs, seed),
        by=by,
        won=[one.problem.id for one, other in pairs if other.scores[by] > one.scores[by]],
        lost=[one.problem.id for one, other in pairs if other.scores[by] < one.scores[by]],
    )


def to_json(found: Comparison) -> dict[str, Any]:
    """All of it, each question's texts included; `first` and `second` are the two evaluations everywhere."""
    shared = set(found.shared)
    sides = {"first": found.first, "second": found.second}
    return {
        **{
            name: {
                "folder": str(side.folder),
                "checkpoint": side.checkpoint,
                "step": side.step,
                "questions": len(side.asked),
                "not_shared": [id for id in side.asked if id not in shared],
            }
            for name, side in sides.items()
        },
        "shared": len(found.shared),
        "level": LEVEL,
        "draws": DRAWS,
        "metrics": {name: asdict(paired) for name, paired in found.metrics.items()},
        "by": found.by,
        "won": [_question_json(id, found) for id in found.won],
        "lost": [_question_json(id, found) for id in found.lost],
    }


def show(found: Comparison, console: Console, *, most: int) -> None:
    """The table of metrics, then the questions won and lost, at most `most` of each."""
    for letter, side in (("A", found.first), ("B", found.second)):
        step = "" if side.step is None else f", step {side.step}"
        console.print(Text(f"{letter}  ").append_text(plain(f"{side.folder}: {side.checkpoint}{step}")))
    counts = f"{len(found.shared):,} shared of {len(found.first.asked):,} and {len(found.second.asked):,}"
    console.print(f"questions: {counts}\n")
    console.print(_metric_table(found))
    console.print(f"\nintervals: {LEVEL:.0%} bootstrap; p: two-sided sign flips, of each metric alone")
    for title, ids in (("won", found.won), ("lost", found.lost)):
        console.print()
        console.print(Text(f"{title} by B in {found.by}: {len(ids):,}", style="bold"))
        if ids[:most]:
            console.print(_question_table(found, ids[:most]))
        if len(ids) > most:
            console.print(f"… {len(ids) - most:,} more: --show {len(ids)}, or --json FILE for all")


def _asked(part: Path, scored: Scored) -> Asked:
    trajectory, outcome = scored.trajectory, scored.trajectory.outcome
    scores = {**scored.scores, str(Name.REWARD): scored.reward}
    lengths = tokens_of_turns(trajectory)
    metrics = {
        **scores,
        "answered": float(outcome.stop is Stop.ANSWERED),
        str(Name.TURNS): float(len(outcome.turns)),
        "searches": float(sum(len(turn.queries) for turn in outcome.turns)),
        **({str(Name.TOKENS_PER_TURN): float(np.mean(lengths))} if lengths else {}),
        "peak_context_tokens": float(max(lengths, default=0)),
        **{name: float(count) for name, count in outcome.counts.items()},
        **memory_quality(trajectory, cli.RULES).means,
    }
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise ValueError(f"{part}: {name} of question {trajectory.problem.id!r} is {value}: evaluate it again")
    return Asked(trajectory.problem, outcome.answer, outcome.stop, scores, metrics)


def _paired_metrics(pairs: Sequence[tuple[Asked, Asked]], seed: int) -> dict[str, Paired]:
    """Every metric over the pairs of which both sides have it; one that no pair has is left out."""
    found = {}
    for name in dict.fromkeys(name for one, _ in pairs for name in one.metrics):
        both = [pair for pair in pairs if all(name in side.metrics for side in pair)]
        if both:
            # A generator of its own: another metric in the table changes no number of this one.
            rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
            value_PE = np.array([[side.metrics[name] for side in pair] for pair in both])
            found[name] = paired_difference(value_PE[:, 0], value_PE[:, 1], rng)
    return found


def _metric_table(found: Comparison) -> Table:
    table = Table("metric", "n", "A", "B", "B − A", "interval", "p", box=None, header_style="dim", pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, paired in found.metrics.items():
        difference = paired.difference
        table.add_row(
            plain(name.replace("_", " ")),
            f"{paired.count:,}",
            _number(paired.first),
            _number(paired.second),
            f"{'+' if difference.mean > 0 else ''}{_number(difference.mean)}",
            Text(f"[{_number(difference.low)}, {_number(difference.high)}]"),  # no console markup
            "<0.0001" if paired.p_value < 1e-4 else f"{paired.p_value:.4f}",
        )
    return table


def _question_table(found: Comparison, ids: Sequence[str]) -> Table:
    table = Table("id", "question", "golden", "A", "B", box=None, header_style="dim", pad_edge=False)
    for id in ids:
        one, other = found.first.asked[id], found.second.asked[id]
        table.add_row(
            plain(shorten(id, ANSWER_CHARACTERS)),
            plain(shorten(one.problem.question, QUESTION_CHARACTERS)),
            plain(shorten(" | ".join(one.problem.golden_answers), ANSWER_CHARACTERS)),
            *(_answer(side) for side in (one, other)),
        )
    return table


def _answer(asked: Asked) -> Text:
    """The answer, or in dim type why there is none."""
    if asked.stop is Stop.ANSWERED:
        return plain(shorten(asked.answer, ANSWER_CHARACTERS))
    return Text(asked.stop.value, style="dim")


def _question_json(id: str, found: Comparison) -> dict[str, Any]:
    sides: Mapping[str, Asked] = {"first": found.first.asked[id], "second": found.second.asked[id]}
    problem = sides["first"].problem
    return {
        "id": id,
        "question": _writable(problem.question),
        "golden_answers": [_writable(answer) for answer in problem.golden_answers],
        **{
            name: {"answer": _writable(side.answer), "stop": side.stop.value, "scores": side.scores}
            for name, side in sides.items()
        },
    }


def _writable(text: str) -> str:
    """A model may write half of a surrogate pair, which UTF-8 can not hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _content(problem: Problem) -> tuple[str, tuple[str, ...]]:
    return problem.question, problem.golden_answers


def _some(evaluation: Evaluation) -> str:
    """A few ids, to tell one set of questions from another by."""
    ids = list(evaluation.asked)
    return ", ".join(ids[:2]) + (", …" if len(ids) > 2 else "") if ids else "nothing"


def _number(value: float) -> str:
    return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.1f}"


if __name__ == "__main__":
    cli.run(main)
