"""Mem-alpha's answer scores and rewards, computed from text without a model (arXiv 2509.25911).

The reward of chunk t is  r1 + 0.05 r3 + r2[t] + 0.1 r4[t].  All chunks of a stream share r1, the mean score of the
questions, and r3, the compression of the final memory; r2[t] is the fraction of the chunk's calls that succeeded, and
r4[t] the fraction whose content a judge finds valid.
"""

from __future__ import annotations

import enum
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from memsearcher_jax.agent.memalpha.conversations import LOCOMO, LONGMEMEVAL, locomo_score
from memsearcher_jax.agent.memalpha.memory import CallResult, Status
from memsearcher_jax.agent.reward import cover_exact_match, golden_texts
from memsearcher_jax.ranges import NonNegative, Probability

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

Gold = Any
"""A golden answer as data sets hold it: text, a list of texts, or an object with a `text`."""

_BOX = re.compile(r"\\boxed\{([^}]*)\}")
_ANSWER_LINE = re.compile(r"answer:(.*)", re.IGNORECASE)
_WORDS = re.compile(r"[a-z]+")
_JSON_BLOCK = re.compile(r"```(?:json)?\s*(\{.*?\})\s*```", re.DOTALL)


@dataclass(frozen=True)
class MemalphaRewardConfig:
    """Weights besides those of r1 and r2, which count once. The defaults are those of the paper's released run."""

    compression_weight: NonNegative = 0.05
    """Of r3, 1 - memory tokens / stream tokens."""
    content_weight: NonNegative = 0.1
    """Of r4, the fraction of a chunk's calls whose content is valid."""
    clip_compression: bool = True
    """Clip r3 to [0, 1]; the original has no lower bound."""
    threshold: Probability = 0.0
    """If positive, r1 is 1 where the mean score reaches the threshold and 0 elsewhere; 0 keeps the mean."""
    count_idle_deletes: bool = False
    """Count a delete that found nothing as a success, as the original does."""


def stream_reward(
    question_scores: Sequence[float],
    *,
    memory_tokens: int,
    stream_tokens: int,
    calls_C: Sequence[float],
    content_C: Sequence[float] | None,
    config: MemalphaRewardConfig,
) -> tuple[tuple[float, ...], float]:
    """(one reward per chunk, of its r2 `calls_C` and r4 `content_C`, which is None without a judge; r3 unweighted).

    `stream_tokens` counts the raw chunks, without the instructions around them.
    Raises ValueError for a stream without questions or without tokens.
    """
    if not question_scores:
        raise ValueError("a stream needs at least one question to be scored")
    answers = sum(question_scores) / len(question_scores)
    if config.threshold:
        answers = float(answers >= config.threshold)
    compression = compression_reward(memory_tokens, stream_tokens, clip=config.clip_compression)
    value_C = [answers + config.compression_weight * compression + calls for calls in calls_C]
    if content_C is not None and config.content_weight:  # 0 x NaN would lose a context whose verdicts all failed
        value_C = [value + config.content_weight * content for value, content in zip(value_C, content_C, strict=True)]
    return tuple(value_C), compression


def calls_reward(results: Sequence[CallResult], config: MemalphaRewardConfig) -> float:
    """r2 of one chunk: the fraction of calls that were executed and not skipped; 0 without calls."""
    succeeded = [result.status is Status.OK and (config.count_idle_deletes or not result.idle) for result in results]
    return sum(succeeded) / len(succeeded) if succeeded else 0.0


def content_reward(verdicts: Sequence[bool | None]) -> float:
    """r4 of one chunk: the fraction of its judged calls whose content is valid; 0 without calls.

    `verdicts` has one entry per call, None where the judge failed; a call without content to judge is not valid. NaN
    where there were calls and all verdicts failed.
    """
    known = [verdict for verdict in verdicts if verdict is not None]
    if not known:
        return math.nan if verdicts else 0.0
    return sum(known) / len(known)


def compression_reward(memory_tokens: int, stream_tokens: int, *, clip: bool = True) -> float:
    """r3: 1 - memory / stream, 1 for an empty memory. Raises ValueError for an empty stream."""
    if stream_tokens <= 0:
        raise ValueError(f"a stream of {stream_tokens} tokens has no compression: remove streams without text")
    compression = 1 - memory_tokens / stream_tokens
    return min(max(compression, 0.0), 1.0) if clip else compression


class AnswerRule(enum.Enum):
    """How one answer is scored. The rules are those of the original, by the names of its data sources."""

    _value_: str
    description: str

    JUDGE = "judge", "a judge compares it with the golden answer"
    CONTAINS = "contains", "it contains a golden answer, both normalised"
    CONTAINS_TEXT = "contains_text", "it contains the first golden answer, in any case"
    ALL_ELEMENTS = "all_elements", "it contains every golden answer, in any case"
    KEYWORDS = "keywords", "the fraction of the keywords that it contains"
    PARTS = "parts", "the fraction of the golden answer's parts between semicolons that it contains"
    LABEL = "label", "its first box, else its text, is the number of the golden answer"
    BOX = "box", "its first box, else its text, is a golden answer"
    ROUGE_L = "rouge_l", "ROUGE-L F1, best over the golden answers"
    LOCOMO = "locomo", "F1 over stems, with rules for some types of question"

    def __new__(cls, value: str, description: str) -> AnswerRule:
        rule = object.__new__(cls)
        rule._value_ = value
        rule.description = description
        return rule


SOURCE_RULES = {
    "squad": AnswerRule.CONTAINS_TEXT,
    "hotpotqa": AnswerRule.CONTAINS_TEXT,
    "perltqa": AnswerRule.PARTS,
    "booksum": AnswerRule.KEYWORDS,
    "pubmed-rct": AnswerRule.LABEL,
    "ttl_train": AnswerRule.LABEL,
    "icl_banking77_5900shot_balance": AnswerRule.LABEL,
    "icl_clinic150_7050shot_balance": AnswerRule.LABEL,
    "icl_nlu_8296shot_balance": AnswerRule.LABEL,
    "icl_trec_coarse_6600shot_balance": AnswerRule.LABEL,
    "icl_trec_fine_6400shot_balance": AnswerRule.LABEL,
    "eventqa_65536": AnswerRule.ALL_ELEMENTS,
    "eventqa_131072": AnswerRule.ALL_ELEMENTS,
    "eventqa_full": AnswerRule.ALL_ELEMENTS,
    "infbench_sum_eng_shots2": AnswerRule.ROUGE_L,
    "infbench_qa_eng_shots2": AnswerRule.ROUGE_L,
    "detectiveqa": AnswerRule.BOX,
    "detective_qa": AnswerRule.BOX,
    "lme_train": AnswerRule.JUDGE,
    LONGMEMEVAL: AnswerRule.JUDGE,
    LOCOMO: AnswerRule.LOCOMO,
}
"""The rule of a data source by its exact name; any other source has `AnswerRule.CONTAINS`."""

EVALUATION_RULES = {
    "infbench_sum_eng_shots2": AnswerRule.KEYWORDS,
    "longmemeval_s*": AnswerRule.JUDGE,
}
"""What the original scores otherwise in evaluation."""

ChosenRules = Mapping[str, AnswerRule]
"""Rules by the exact name of a source, of the setting memalpha.answer_rules."""
NO_RULES: ChosenRules = {}


def chosen_rules(settings: Iterable[str]) -> dict[str, AnswerRule]:
    """The rules of `memalpha.answer_rules`. Raises ValueError in one line for one that is not SOURCE=RULE."""
    chosen: dict[str, AnswerRule] = {}
    for setting in settings:
        source, equals, name = setting.rpartition("=")
        names = [rule.value for rule in AnswerRule]
        if not equals or not source or name not in names:
            raise ValueError(f"memalpha.answer_rules {setting!r} is not SOURCE=RULE with a rule of {', '.join(names)}")
        chosen[source] = AnswerRule(name)
    return chosen


def answer_rule(source: str, chosen: ChosenRules = NO_RULES, *, evaluation: bool = False) -> AnswerRule:
    """The rule of a data source: the one that was chosen for it, else the one of its exact name."""
    if source in chosen:
        return chosen[source]
    if evaluation and source in EVALUATION_RULES:
        return EVALUATION_RULES[source]
    return SOURCE_RULES.get(source, AnswerRule.CONTAINS)


def question_score(
    source: str,
    prediction: str,
    gold: Gold,
    judge_reply: str | None = None,
    *,
    evaluation: bool = False,
    kind: str = "",
    chosen: ChosenRules = NO_RULES,
) -> float:
    """The score in [0, 1] of one answer, by the rule of its data source; `kind` is the question's type.

    Raises ValueError if the rule needs a judge's reply and there is none: a missing judge is a fault, not a wrong
    answer. A missing golden answer is matched by nothing.
    """
    if _is_missing(gold):
        return 0.0
    if isinstance(gold, list):
        gold = [entry for entry in gold if not _is_missing(entry)]
    answer = after_thoughts(prediction)
    match answer_rule(source, chosen, evaluation=evaluation):
        case AnswerRule.JUDGE:
            if judge_reply is None:
                raise ValueError(f"a judge scores the answers of {source}, and its reply is missing: set judge.backend")
            return float(judge_agrees(after_thoughts(judge_reply)))
        case AnswerRule.CONTAINS:
            return best_score(cover_exact_match, answer, gold)
        case AnswerRule.CONTAINS_TEXT:
            expected = _first_text(gold)
            return float(bool(expected) and expected.lower() in answer.lower())
        case AnswerRule.ALL_ELEMENTS:
            elements = [gold] if isinstance(gold, int) else gold  # a text is taken letter by letter, as in the original
            return float(bool(elements) and all(str(element).lower() in answer.lower() for element in elements))
        case AnswerRule.KEYWORDS:
            return _keyword_recall(answer, gold)
        case AnswerRule.PARTS:
            return _part_recall(answer, _first_text(gold))
        case AnswerRule.LABEL:
            return float(_same_number(answer, gold))
        case AnswerRule.BOX:
            return float(short_answer(answer) in golden_texts(gold))
        case AnswerRule.ROUGE_L:
            return best_score(rouge_l, answer, gold)
        case AnswerRule.LOCOMO:
            return locomo_score(answer, _first_text(gold), kind)


def judge_agrees(reply: str) -> bool:
    """Whether a judge's reply contains the word "yes" and neither "no" nor "not"."""
    words = set(_WORDS.findall(reply.lower()))
    return "yes" in words and words.isdisjoint(("no", "not"))


def parse_verdict(reply: str) -> bool | None:
    """Whether the judge calls a content valid; None if the reply, after thoughts, does not say so in JSON."""
    reply = after_thoughts(reply)
    block = _JSON_BLOCK.search(reply)
    try:
        verdict = json.loads(block[1] if block else reply)
    except (ValueError, RecursionError):
        return None
    valid = verdict.get("VALID") if isinstance(verdict, dict) else None
    return valid if isinstance(valid, bool) else None


def short_answer(prediction: str) -> str:
    """The content of the first box, which ends at its first closing brace as in the original, else the text."""
    match = _BOX.search(prediction)
    return (match[1] if match else prediction).strip()


def answer_line(prediction: str) -> str:
    """The text after the first `Answer:` up to the end of that line, else the first line."""
    match = _ANSWER_LINE.search(prediction)
    line = match[1] if match else prediction.partition("\n")[0]
    line = line.strip()
    return line[len("answer:") :].strip() if line.lower().startswith("answer:") else line


def rouge_l(prediction: str, golden: str) -> float:
    """The F1 of ROUGE-L (Lin, 2004) over Porter stems."""
    return _rouge_scorer().score(golden, prediction)["rougeL"].fmeasure


@cache
def _rouge_scorer() -> RougeScorer:
    # rouge_score imports NLTK, which takes more than half a second
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)


def best_score(metric: Callable[[str, str], float], prediction: str, gold: Gold) -> float:
    """The maximum over the golden answers, of the complete prediction and of its `answer_line`; 0 if there are none."""
    texts = prediction, answer_line(prediction)
    return max((metric(text, golden) for golden in golden_texts(gold) for text in texts), default=0.0)


def after_thoughts(prediction: str) -> str:
    """The text after a thought; a prediction with an open thought has no answer."""
    if "</think>" in prediction:
        prediction = prediction.split("</think>")[1].strip()
    return "Empty" if "<think>" in prediction else prediction


def _is_missing(gold: Gold) -> bool:
    """Whether there is no golden answer: null, an object without text, or a list of such. An empty text is one."""
    if isinstance(gold, dict):
        return gold.get("text") is None
    return gold is None or (isinstance(gold, list) and all(map(_is_missing, gold)))


def _first_text(gold: Gold) -> str:
    if isinstance(gold, list):
        return golden_texts(gold)[0] if gold else ""
    return str(gold.get("text", gold)) if isinstance(gold, dict) else str(gold)


def _keyword_recall(answer: str, gold: Gold) -> float:
    """The fraction of the keywords in the answer. As in the original, an empty keyword between commas is found."""
    keywords = [str(word).strip().lower() for word in (gold if isinstance(gold, list) else str(gold).split(","))]
    if not any(keywords):
        return 0.0
    return sum(keyword in answer.lower() for keyword in keywords) / len(keywords)


def _part_recall(answer: str, gold: str) -> float:
    parts = [part.strip() for part in gold.split(";")] if ";" in gold else [gold]
    return sum(part.lower() in answer.lower() for part in parts) / len(parts)


def _same_number(answer: str, gold: Gold) -> bool:
    """Whether the answer consists of digits and is exactly the gold: `03` is not `3`."""
    digits = _unquoted(short_answer(answer))
    expected = _unquoted(_first_text(gold))
    return re.fullmatch(r"\d+", digits) is not None and digits == expected


def _unquoted(text: str) -> str:
    return text.strip("\"'").strip()
