"""Asks a service whether the answers of an evaluation are right, after they are all on disk."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

from memsearcher_jax.agent.answer_judge import Judgement, calibration_error, judge_prompt, parse_judgement
from memsearcher_jax.jsonl import encode_line, parse_object
from memsearcher_jax.logs.trajectories import HOST_FILES, read_trajectories, summarize_trajectory
from memsearcher_jax.report.statistics import mean_interval
from memsearcher_jax.rl.completers import Completer, open_openai_completer
from memsearcher_jax.rl.config import CompleterConfig
from memsearcher_jax.types import Completion, FinishReason, StopReason

JUDGEMENTS_FILE = "judgements.jsonl"
REPLY_TOKENS = 1_024
SHOWN_CHARS = 200  # of a reply that cannot be read
CUT_OFF = Completion(error="its reply is cut off: start another evaluation with more max_tokens in judge.extra_body")


class Answer(NamedTuple):
    id: str
    benchmark: str
    question: str
    golden_answers: tuple[str, ...]
    text: str | None  # None: the trajectory ended without an answer
    exact_match: bool | None  # None: an agent without such a score


def read_answers(folder: Path, default_dataset: str) -> list[Answer]:
    """The answers of an evaluation, without trajectories that were lost. Raises ValueError for a damaged file."""
    answers = []
    for path in sorted(folder.glob(HOST_FILES)):
        for scored in read_trajectories(path):
            outcome = scored.trajectory.outcome
            if outcome.stop.is_fault:
                continue
            problem = scored.trajectory.problem
            summary = summarize_trajectory(scored)
            answer = Answer(
                id=problem.id,
                benchmark=summary.dataset or default_dataset,
                question=problem.question,
                golden_answers=problem.golden_answers,
                text=outcome.answer if outcome.stop is StopReason.ANSWERED else None,
                exact_match=summary.correct,
            )
            answers.append(answer)
    return answers


def open_judge(config: CompleterConfig) -> Completer:
    """Raises ValueError if the settings do not suffice."""
    return open_openai_completer(config, section="judge", max_tokens=REPLY_TOKENS, temperature=0.0)


def judge_answers(answers: Sequence[Answer], config: CompleterConfig, file: Path) -> dict[str, Judgement | None]:
    """The judgement of each answer by the id of its question; those in `file` are not asked for again.

    No answer is not correct. None: the judge refuses the answer, or its reply is cut off or unreadable. An answer is
    missing if the service was down. As soon as none of `max_concurrency` replies comes, no more are asked for.
    """
    judge = open_judge(config)
    judgements: dict[str, Judgement | None] = {}
    with file.open("a+b") as log:
        for number, line in enumerate(_complete_lines(log), start=1):
            row = parse_object(f"{file}:{number}", line)
            judgements[row["id"]] = Judgement(row["correct"], row["confidence"])
        asked = [answer for answer in answers if answer.text is not None and answer.id not in judgements]
        for start in range(0, len(asked), config.max_concurrency):
            batch = asked[start : start + config.max_concurrency]
            prompts = [judge_prompt(answer.question, answer.golden_answers, answer.text or "") for answer in batch]
            replies = judge.complete(prompts, jax.random.key(0))
            replies = [CUT_OFF if reply.finish is FinishReason.LENGTH else reply for reply in replies]
            errors = [reply.error for reply in replies if reply.error]
            if errors:
                print(f"the judge does not answer: {errors[-1]}", file=sys.stderr)
            is_down = all(reply.lost for reply in replies)
            never_answered = len(errors) == len(batch) and not judgements
            if is_down or never_answered:
                break
            for answer, reply in zip(batch, replies, strict=True):
                judgement = parse_judgement(reply.text)
                if judgement is None and not reply.error:
                    shown = repr(reply.text[:SHOWN_CHARS])
                    print(f"the judge's reply about question {answer.id!r} cannot be read: {shown}", file=sys.stderr)
                if judgement:
                    log.write(encode_line({"id": answer.id, **asdict(judgement), "reply": reply.text}).encode())
                if not reply.lost:
                    judgements[answer.id] = judgement
            log.flush()
            print(f"judged {start + len(batch):,} of {len(asked):,} answers", file=sys.stderr)
    without_text = {answer.id: Judgement(False) for answer in answers if answer.text is None}
    return judgements | without_text


def _complete_lines(log: BinaryIO) -> list[bytes]:
    """The lines of a file, from which an incomplete last one is removed, which a full disk leaves behind."""
    log.seek(0)
    lines = log.read().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        incomplete = lines.pop()
        log.truncate(log.tell() - len(incomplete))
    return lines


def summarize_judgements(
    answers: Sequence[Answer], judgements: Mapping[str, Judgement | None], seed: int
) -> dict[str, Any]:
    """By benchmark how many answers were judged, and how many of these are correct.

    Then also the interval of this accuracy, the agreement with exact match, and the calibration error. These numbers
    are missing if the service was down before all were asked for: the first ones are no sample, and none of them has
    no answer.
    """
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer.benchmark, []).append(answer)
    return {benchmark: _summary(group, judgements, seed) for benchmark, group in groups.items()}


def _summary(answers: Sequence[Answer], judgements: Mapping[str, Judgement | None], seed: int) -> dict[str, Any]:
    """What `summarize_judgements` has for one benchmark."""
    correct = []
    agrees = []  # with exact match
    stated = []  # judgements of texts, which have a confidence
    for answer in answers:
        judgement = judgements.get(answer.id)
        if judgement is None:
            continue
        correct.append(judgement.correct)
        if answer.exact_match is not None:
            agrees.append(judgement.correct == answer.exact_match)
        if answer.text is not None:
            stated.append(judgement)
    summary: dict[str, Any] = {"questions": len(answers), "unjudged": len(answers) - len(correct)}
    all_judged = len(correct) == len(answers)
    all_asked = bool(stated) and all(answer.id in judgements for answer in answers)
    if all_judged or all_asked:
        accuracy = mean_interval(np.array(correct, float), np.random.default_rng(seed))
        summary |= {
            "accuracy": asdict(accuracy),
            "agreement_with_exact_match": sum(agrees) / len(agrees) if agrees else None,
            "calibration_error": calibration_error(stated),
        }
    return summary
