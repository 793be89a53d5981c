"""Asks a service whether the answers of an evaluation are right, after they are all on disk."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

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
            problem, outcome = scored.trajectory.problem, scored.trajectory.outcome
            if not outcome.stop.is_fault:
                text = outcome.answer if outcome.stop is StopReason.ANSWERED else None
                summary = summarize_trajectory(scored)
                benchmark, exact = summary.dataset or default_dataset, summary.correct
                answers.append(Answer(problem.id, benchmark, problem.question, problem.golden_answers, text, exact))
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
        log.seek(0)
        lines = log.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):  # the disk was full
            log.truncate(log.tell() - len(lines.pop()))
        for number, line in enumerate(lines, start=1):
            row = parse_object(f"{file}:{number}", line)
            judgements[row["id"]] = Judgement(row["correct"], row["confidence"])
        asked = [one for one in answers if one.text is not None and one.id not in judgements]
        for start in range(0, len(asked), config.max_concurrency):
            batch = asked[start : start + config.max_concurrency]
            prompts = [judge_prompt(one.question, one.golden_answers, one.text or "") for one in batch]
            replies = judge.complete(prompts, jax.random.key(0))
            replies = [CUT_OFF if reply.finish is FinishReason.LENGTH else reply for reply in replies]
            if errors := [reply.error for reply in replies if reply.error]:
                print(f"the judge does not answer: {errors[-1]}", file=sys.stderr)
            if all(reply.lost for reply in replies) or (len(errors) == len(batch) and not judgements):
                break
            for one, reply in zip(batch, replies, strict=True):
                if judgement := parse_judgement(reply.text):
                    log.write(encode_line({"id": one.id, **asdict(judgement), "reply": reply.text}).encode())
                if not reply.lost:
                    judgements[one.id] = judgement
            log.flush()
            print(f"judged {start + len(batch):,} of {len(asked):,} answers", file=sys.stderr)
    return judgements | {one.id: Judgement(False) for one in answers if one.text is None}


def summarize_judgements(
    answers: Sequence[Answer], judgements: Mapping[str, Judgement | None], seed: int
) -> dict[str, Any]:
    """By benchmark how many answers were judged, and of these the accuracy with its interval, the agreement with exact
    match, and the calibration error. The numbers are missing if the service was down before all were asked for: the
    first ones are no sample, and none of them has no answer."""
    groups: dict[str, list[Answer]] = {}
    for one in answers:
        groups.setdefault(one.benchmark, []).append(one)
    summary: dict[str, Any] = {}
    for name, group in groups.items():
        judged = [(one, judgement) for one in group if (judgement := judgements.get(one.id))]
        stated = [judgement for one, judgement in judged if one.text is not None]
        summary[name] = {"questions": len(group), "unjudged": len(group) - len(judged)}
        if len(judged) == len(group) or (stated and all(one.id in judgements for one in group)):
            right = [judgement.correct for _, judgement in judged]
            agreeing = [
                judgement.correct == one.exact_match for one, judgement in judged if one.exact_match is not None
            ]
            summary[name] |= {
                "accuracy": asdict(mean_interval(np.array(right, float), np.random.default_rng(seed))),
                "agreement_with_exact_match": sum(agreeing) / len(agreeing) if agreeing else None,
                "calibration_error": calibration_error(stated),
            }
    return summary
