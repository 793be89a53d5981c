"""A judge of short answers, besides exact match and F1: what a language model is asked, and how its reply is read.

The criteria are those of MemSearcher's `scripts/evaluation/llm_judge.py` in our words: an answer is correct if it means
the same as one of the golden answers. BrowseComp-Plus (arXiv 2508.06600) also asks for the confidence that the answer
states, 100 where it states none, and reports its calibration error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from memsearcher_jax.agent.prompts import fill
from memsearcher_jax.types import Prompt

INSTRUCTIONS = """\
You compare an answer to a question with its golden answers. The answer is correct if it means the same as one of them \
for this question: other words, more detail that is right, and small differences of numbers by rounding do not matter. \
It is incorrect if it contradicts them, names several possibilities, or leaves out what was asked. Do not solve the \
question yourself. Reply with JSON and nothing else:
{"rationale": "one sentence", "judgement": "correct" or "incorrect", "confidence": the confidence in percent that the \
answer itself states, or 100 if it states none}"""
BIN_SIZE = 100  # answers of a bin of the calibration error, of which there must be one at least

_OBJECT = re.compile(r"\{.*\}", re.DOTALL)


@dataclass(frozen=True)
class Judgement:
    correct: bool
    confidence: float = 100.0  # percent, that the answer states


def judge_prompt(question: str, golden_answers: Sequence[str], answer: str) -> Prompt:
    """Asks whether the answer is correct."""
    case = f"Question: {question}\nGolden answers: {json.dumps(list(golden_answers), ensure_ascii=False)}"
    return fill((INSTRUCTIONS,), ("", "\nAnswer: ", ""), {"case": case, "answer": answer})


def parse_judgement(reply: str) -> Judgement | None:
    """None for a reply that does not say "correct" or "incorrect" in JSON, after its thoughts. Total."""
    found = _OBJECT.search(reply.rpartition("</think>")[2].partition("<think>")[0])
    try:
        fields: Any = json.loads(found[0]) if found else None
    except (ValueError, RecursionError):
        return None
    verdict = str(fields.get("judgement")).strip().lower() if isinstance(fields, dict) else ""
    if verdict not in ("correct", "incorrect"):
        return None
    stated = re.search(r"-?\d+(\.\d+)?", str(fields.get("confidence")))  # such as 85 or "85 %"
    return Judgement(verdict == "correct", min(max(float(stated[0]), 0.0), 100.0) if stated else 100.0)


def calibration_error(judgements: Sequence[Judgement]) -> float | None:
    """The root mean square difference of confidence and accuracy over bins of `BIN_SIZE` answers, in [0, 1].

    After Hendrycks et al. (2019): answers in the order of their confidence, the last bin takes the rest. The code of
    Humanity's Last Exam and of BrowseComp-Plus (`scripts_evaluation/evaluate_run.py`), and so the published numbers,
    leave the last bin out of the sum. None if there are fewer answers than a bin holds.
    """
    by_confidence = sorted(judgements, key=lambda judgement: judgement.confidence)
    errors = [judgement.confidence / 100 - judgement.correct for judgement in by_confidence]
    number_of_bins = len(errors) // BIN_SIZE
    if not number_of_bins:
        return None
    starts = [BIN_SIZE * number for number in range(number_of_bins)]
    ends = [*starts[1:], len(errors)]
    squares = [(end - start) * fmean(errors[start:end]) ** 2 for start, end in zip(starts, ends, strict=True)]
    return math.sqrt(sum(squares) / len(errors))
