"""Answer metrics and rewards, computed from text without a model.

The metrics are those of SQuAD (Rajpurkar et al., 2016) with the yes/no rule of HotpotQA (Yang et al., 2018). Golden
answers are one string or several; None among them is ignored, other values are converted by `str`.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from memsearcher_jax.agent import protocol
from memsearcher_jax.agent.config import PAPER_REWARD, RewardConfig
from memsearcher_jax.types import Objectives, Outcome, StopReason

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
_ASSISTANT_TURN = re.compile(r"<\|im_start\|>assistant\n(.*?)<\|im_end\|>", re.DOTALL)

Parsed = tuple[str | None, str]
"""The answer of a transcript, or None, and its format error, or ""."""


@dataclass(frozen=True)
class Reward:
    """A trajectory's reward, in [0, 1] for one question, NaN if there is none, and the reason."""

    value: float
    reason: str


class Overlap(NamedTuple):
    """Token overlap; each field is a separate maximum over the golden answers."""

    f1: float = 0.0
    precision: float = 0.0
    recall: float = 0.0


def normalize(text: str) -> str:
    """Lower-cases, removes ASCII punctuation and English articles, and collapses white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def golden_texts(gold: Any) -> list[str]:
    """All golden answers of a stream's question, with nested lists flattened."""
    if not isinstance(gold, list):
        return [str(gold)]
    return [str(text) for entry in gold for text in (entry if isinstance(entry, list) else [entry])]


def exact_match(prediction: str | None, golden_answers: Sequence[str] | str) -> float:
    """1.0 if the normalised prediction equals a normalised golden answer, else 0.0. No prediction scores 0.0."""
    return float(prediction is not None and normalize(prediction) in _normalized(golden_answers))


def cover_exact_match(prediction: str | None, golden_answers: Sequence[str] | str) -> float:
    """1.0 if the normalised prediction contains a normalised golden answer, even inside a word, else 0.0."""
    if prediction is None:
        return 0.0
    predicted = normalize(prediction)
    return float(any(golden in predicted for golden in _normalized(golden_answers)))


def token_f1(prediction: str | None, golden_answers: Sequence[str] | str) -> float:
    """Best F1 of normalised tokens over the golden answers; yes, no and noanswer must match exactly."""
    return token_overlap(prediction, golden_answers).f1


def token_overlap(prediction: str | None, golden_answers: Sequence[str] | str) -> Overlap:
    """F1, precision and recall of normalised tokens; see `token_f1`."""
    if prediction is None:
        return Overlap()
    predicted = normalize(prediction)
    overlaps = [_overlap(predicted, golden) for golden in _normalized(golden_answers)]
    return Overlap(*map(max, zip(*overlaps, strict=True))) if overlaps else Overlap()


def answer_scores(answer: str | None, golden_answers: Sequence[str] | Objectives | str) -> dict[str, float]:
    """Every metric of an answer, in [0, 1]; all are 0 without one. Of several questions, their means."""
    if isinstance(golden_answers, Objectives):
        parts = [] if answer is None else [part.strip() for part in answer.split(";")]
        pairs = itertools.zip_longest(parts[: len(golden_answers)], golden_answers)
        scores_of_parts = [answer_scores(part, golden) for part, golden in pairs]
        names = scores_of_parts[0]
        return {name: sum(scores[name] for scores in scores_of_parts) / len(scores_of_parts) for name in names}
    overlap = token_overlap(answer, golden_answers)
    return {
        "exact_match": exact_match(answer, golden_answers),
        "f1": overlap.f1,
        "cover_exact_match": cover_exact_match(answer, golden_answers),
        "precision": overlap.precision,
        "recall": overlap.recall,
    }


def memsearcher_reward(transcript: str, golden_answers: Sequence[str] | str) -> Reward:
    """The original's reward of a trajectory, whose last context is given as ChatML text.

    0 if the text does not end with `<|im_end|>`, breaks the format or has no complete box in its last assistant turn;
    otherwise the token F1, or 0.1 if that is 0. Quirks of the original are kept: a box inside `<think>` counts, and
    only the first assistant turn must have a thought and valid tool calls.
    """
    answer, error = _parse(transcript, visible=lambda turn: turn)
    return _answer_reward(answer, error, golden_answers, PAPER_REWARD)


def parse_boxed(transcript: str) -> Parsed:
    """(answer, format error) of the workflows that answer in a box.

    The rule is that of `memsearcher_reward`, but a box counts only outside the thoughts of the last turn.
    """
    return _parse(transcript, visible=protocol.without_thoughts)


def trajectory_reward(
    outcome: Outcome,
    transcript: str,
    golden_answers: Sequence[str] | Objectives | str,
    settings: RewardConfig = PAPER_REWARD,
    parse: Callable[[str], Parsed] = parse_boxed,
) -> Reward:
    """The reward of a trajectory of any workflow that answers questions.

    NaN, no reward, where a fault of the machinery ended it: 0 would teach the policy to avoid what failed.

    `transcript` is the ChatML text of the last context, which `parse` reads by the workflow's format.
    """
    if outcome.stop.is_fault:
        return Reward(math.nan, f"lost: {outcome.stop.value}")
    if outcome.stop is not StopReason.ANSWERED:
        return Reward(0.0, outcome.stop.value)
    return _answer_reward(*parse(transcript), golden_answers, settings)


def _parse(transcript: str, *, visible: Callable[[str], str]) -> Parsed:
    """`visible` returns the part of the last assistant turn in which a box counts."""
    if not transcript.endswith("<|im_end|>"):
        return None, "not end with eos token"
    # A turn extends to the next end token, even past the start of another.
    turns = [turn.strip() for turn in _ASSISTANT_TURN.findall(transcript)]
    last_turn = visible(turns[-1]) if turns else ""
    answer = protocol.last_box(last_turn)
    if error := _format_error(turns):
        return answer, f"bad format: {error}"
    if "\\box" not in last_turn:
        return None, "bad format: the last response is missing \\boxed"
    return answer, "" if answer is not None else "find box error: no complete \\boxed{}"


def _answer_reward(
    answer: str | None, error: str, golden_answers: Sequence[str] | Objectives | str, settings: RewardConfig
) -> Reward:
    if answer is None or (error and settings.require_format):
        return Reward(0.0, error)
    value = answer_scores(answer, golden_answers)[settings.metric]
    if isinstance(golden_answers, Objectives):
        value *= len(golden_answers)  # a sum, as in MEM1
    if value > 0:
        return Reward(value, f"correct answer, get {settings.metric} score: {value}")
    return Reward(0.0, error) if error else Reward(settings.wrong_answer, f"wrong answer but good format: {answer}")


def _format_error(turns: Sequence[str]) -> str:
    """The format error of the assistant turns, or ""."""
    if not turns:
        return "no assistant response found"
    for number, turn in enumerate(turns):
        opened = turn.count("<think>")
        closed = turn.count("</think>")
        if opened != closed:
            return f"<think> and </think> are not paired: think={opened}, think_end={closed}"
        if number == 0 and opened == 0:
            return "missing <think> tag"
        opened = turn.count("<tool_call>")
        closed = turn.count("</tool_call>")
        if opened != closed:
            return f"<tool_call> and </tool_call> are not paired: tool_call={opened}, tool_call_end={closed}"
        if number == 0 and (error := _call_error(turn)):
            return error
    return ""


def _call_error(turn: str) -> str:
    """The error of the first invalid tool call, or "". Unlike `protocol.tool_calls`, tolerates unbalanced tags."""
    for body in re.findall("<tool_call>(.*?)</tool_call>", turn, re.DOTALL):
        call = body.strip()
        if '"name"' not in call or '"arguments"' not in call:
            return "tool_call is missing name or arguments field"
        try:
            json.loads(call)
        except (ValueError, RecursionError):
            return f"tool_call is not a valid json: {call}"
    return ""


def _overlap(predicted: str, golden: str) -> Overlap:
    if predicted != golden and not _CLOSED_ANSWERS.isdisjoint((predicted, golden)):
        return Overlap()
    predicted_tokens = predicted.split()
    golden_tokens = golden.split()
    common = (Counter(predicted_tokens) & Counter(golden_tokens)).total()
    if common == 0:
        return Overlap()
    precision = common / len(predicted_tokens)
    recall = common / len(golden_tokens)
    return Overlap(2 * precision * recall / (precision + recall), precision, recall)


def _normalized(golden_answers: Any) -> list[str]:
    are_several = isinstance(golden_answers, Iterable) and not isinstance(golden_answers, str)
    answers = golden_answers if are_several else [golden_answers]
    return [normalize(str(answer)) for answer in answers if answer is not None]
