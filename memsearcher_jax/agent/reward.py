"""Answer metrics and rewards: numbers from text, no model and no state.

The metrics are those of SQuAD (Rajpurkar et al., 2016) with the yes/no rule of HotpotQA (Yang et al., 2018). Golden
answers may be one string or several; None among them is no answer, other values count as they print.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from memsearcher_jax.agent import protocol
from memsearcher_jax.agent.types import Outcome, Stop

FORMAT_REWARD = 0.1
"""What a well-formed wrong answer earns."""

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
_TURN_OPENS, _TURN_ENDS = "<|im_start|>assistant\n", "<|im_end|>"


@dataclass(frozen=True)
class Reward:
    """A trajectory's reward in [0, 1] and one line on why."""

    value: float
    reason: str


class Overlap(NamedTuple):
    """Token overlap; each is the maximum over the golden answers on its own."""

    f1: float = 0.0
    precision: float = 0.0
    recall: float = 0.0


def normalize(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, white space collapsed."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str | None, golden_answers: Sequence[str] | str) -> float:
    """1.0 if the normalised prediction equals a normalised golden answer, else 0.0. No prediction scores 0.0."""
    return _any(prediction, golden_answers, lambda predicted, golden: predicted == golden)


def cover_exact_match(prediction: str | None, golden_answers: Sequence[str] | str) -> float:
    """1.0 if the normalised prediction contains a normalised golden answer, even inside a word, else 0.0."""
    return _any(prediction, golden_answers, lambda predicted, golden: golden in predicted)


def token_f1(prediction: str | None, golden_answers: Sequence[str] | str) -> float:
    """Best F1 of normalised tokens over the golden answers; yes, no and noanswer must match wholly."""
    return token_overlap(prediction, golden_answers).f1


def token_overlap(prediction: str | None, golden_answers: Sequence[str] | str) -> Overlap:
    """F1, precision and recall of normalised tokens; see `token_f1`."""
    if prediction is None:
        return Overlap()
    overlaps = [_overlap(normalize(prediction), normalize(golden)) for golden in _texts(golden_answers)]
    return Overlap(*map(max, zip(*overlaps, strict=True))) if overlaps else Overlap()


def memsearcher_reward(transcript: str, golden_answers: Sequence[str] | str) -> Reward:
    """The original's reward of a trajectory's last context, given as ChatML text.

    0 if the text does not end with `<|im_end|>`, breaks the format or holds no readable box in its last assistant
    turn; else the token F1; 0.1 where that is 0. Its quirks are kept: a box inside `<think>` counts, and only the
    first assistant turn must have a thought and readable tool calls.
    """
    return _judge(transcript, golden_answers, visible=lambda turn: turn)


def score(outcome: Outcome, transcript: str, golden_answers: Sequence[str] | str) -> Reward:
    """Our reward of a trajectory of any workflow: 0 unless it ended by answering outside `<think>`.

    `transcript` is the last context's ChatML text. An answered trajectory is judged like the original's, but the box
    is looked for outside the last turn's thoughts.
    """
    if outcome.stop is not Stop.ANSWERED:
        return Reward(0.0, outcome.stop.value)
    return _judge(transcript, golden_answers, visible=protocol.without_thoughts)


def _judge(transcript: str, golden_answers: Sequence[str] | str, *, visible: Callable[[str], str]) -> Reward:
    """`visible` is the part of the last assistant turn in which a box counts."""
    if not transcript.endswith(_TURN_ENDS):
        return Reward(0.0, "not end with eos token")
    turns = _assistant_turns(transcript)
    if fault := _format_fault(turns):
        return Reward(0.0, f"bad format: {fault}")
    shown = visible(turns[-1])
    if "\\box" not in shown:
        return Reward(0.0, "bad format: the last response is missing \\boxed")
    answer = protocol.last_box(shown)
    if answer is None:
        return Reward(0.0, "find box error: no complete \\boxed{}")
    f1 = token_f1(answer, golden_answers)
    if f1 > 0:
        return Reward(f1, f"correct answer, get f1 score: {f1}")
    return Reward(FORMAT_REWARD, f"wrong answer but good format: {answer}")


def _assistant_turns(transcript: str) -> list[str]:
    """The closed assistant turns, stripped. A turn goes on to the next end token, whatever opens in between."""
    turns, rest = [], transcript
    while True:
        _, opened, rest = rest.partition(_TURN_OPENS)
        turn, closed, rest = rest.partition(_TURN_ENDS)
        if not (opened and closed):
            return turns
        turns.append(turn.strip())


def _format_fault(turns: Sequence[str]) -> str:
    """What is wrong with the assistant turns, or ""."""
    if not turns:
        return "no assistant response found"
    for number, turn in enumerate(turns):
        thoughts = turn.count("<think>"), turn.count("</think>")
        if thoughts[0] != thoughts[1]:
            return f"<think> and </think> are not paired: think={thoughts[0]}, think_end={thoughts[1]}"
        if number == 0 and thoughts[0] == 0:
            return "missing <think> tag"
        calls = turn.count("<tool_call>"), turn.count("</tool_call>")
        if calls[0] != calls[1]:
            return f"<tool_call> and </tool_call> are not paired: tool_call={calls[0]}, tool_call_end={calls[1]}"
        if number == 0 and (fault := _call_fault(turn)):
            return fault
    return ""


def _call_fault(turn: str) -> str:
    """What is wrong with the tool calls, or "". Unlike `protocol.tool_calls` it reads on until a tag lacks its pair."""
    for body in re.findall("<tool_call>(.*?)</tool_call>", turn, re.DOTALL):
        call = body.strip()
        if '"name"' not in call or '"arguments"' not in call:
            return "tool_call is missing name or arguments field"
        if not protocol.is_json(call):
            return f"tool_call is not a valid json: {call}"
    return ""


def _any(prediction: str | None, golden_answers: Sequence[str] | str, holds: Callable[[str, str], bool]) -> float:
    if prediction is None:
        return 0.0
    predicted = normalize(prediction)
    return float(any(holds(predicted, normalize(golden)) for golden in _texts(golden_answers)))


def _overlap(predicted: str, golden: str) -> Overlap:
    if predicted != golden and not _CLOSED_ANSWERS.isdisjoint((predicted, golden)):
        return Overlap()
    predicted_tokens, golden_tokens = predicted.split(), golden.split()
    common = (Counter(predicted_tokens) & Counter(golden_tokens)).total()
    if common == 0:
        return Overlap()
    precision, recall = common / len(predicted_tokens), common / len(golden_tokens)
    return Overlap(2 * precision * recall / (precision + recall), precision, recall)


def _texts(golden_answers: object) -> list[str]:
    one = isinstance(golden_answers, str) or not isinstance(golden_answers, Iterable)
    return [str(answer) for answer in ([golden_answers] if one else golden_answers) if answer is not None]
