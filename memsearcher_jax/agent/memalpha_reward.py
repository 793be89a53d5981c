"""Mem-alpha's scores of answers and its rewards: numbers from text, no model and no state (arXiv 2509.25911, 4.1).

The reward of chunk t is  r1 + 0.05 r3 + r2[t] + 0.1 r4[t]:  r1 is how well the questions are answered from the final
memory and r3 how short that memory is, the same for all chunks of a stream; r2[t] is the share of the chunk's calls
that worked and r4[t] the share whose content a judge finds valid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from memsearcher_jax.agent.memalpha_memory import Result, Status
from memsearcher_jax.agent.memalpha_rouge import rouge_l, rouge_l_sum
from memsearcher_jax.agent.reward import cover_exact_match, exact_match, token_f1

Gold = Any
"""A golden answer as data sets hold it: text, a list of texts, or an object with a `text`."""

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_BOXES = (re.compile(r"\\boxed\{([^}]*)\}"), re.compile(r"\\box\{([^}]*)\}"))
_ANSWER_LINE = re.compile(r"answer:(.*)", re.IGNORECASE)
_WORDS = re.compile(r"[a-z]+")


@dataclass(frozen=True)
class MemalphaRewardConfig:
    """Weights of the four parts. The defaults are those of the paper's released run."""

    answers_weight: float = 1.0
    """Of r1, the mean score of the stream's questions."""
    compression_weight: float = 0.05
    """Of r3, 1 - memory tokens / stream tokens."""
    calls_weight: float = 1.0
    """Of r2, the share of a chunk's calls that worked."""
    content_weight: float = 0.1
    """Of r4, the share of a chunk's calls whose content is valid."""
    clip_compression: bool = True
    """Keep r3 in [0, 1]; the original has no lower bound."""
    threshold: float = 0.0
    """Above 0: r1 is 1 from here on and 0 below; 0: it stays the mean."""
    count_idle_deletes: bool = False
    """Let a delete that found nothing count as a call that worked, as the original does."""


@dataclass(frozen=True)
class StreamReward:
    """The reward of one trajectory, chunk by chunk; the parts are before their weights."""

    value_C: tuple[float, ...]
    answers: float  # r1
    compression: float  # r3
    calls_C: tuple[float, ...]  # r2
    content_C: tuple[float, ...] | None  # r4; None where there is no judge of content


def stream_reward(
    question_scores: Sequence[float],
    *,
    memory_tokens: int,
    stream_tokens: int,
    calls_C: Sequence[float],
    content_C: Sequence[float] | None,
    config: MemalphaRewardConfig,
) -> StreamReward:
    """One reward for each chunk. `stream_tokens` are those of the raw chunks, without the instruction around them.

    Raises ValueError for a stream without questions or without tokens, which has no reward.
    """
    if not question_scores:
        raise ValueError("a stream needs at least one question to be scored")
    answers = sum(question_scores) / len(question_scores)
    if config.threshold:
        answers = float(answers >= config.threshold)
    compression = compression_reward(memory_tokens, stream_tokens, clip=config.clip_compression)
    shared = config.answers_weight * answers + config.compression_weight * compression
    value_C = [shared + config.calls_weight * calls for calls in calls_C]
    if content_C is not None:
        pairs = zip(value_C, content_C, strict=True)
        value_C = [value + config.content_weight * content for value, content in pairs]
    content_C = None if content_C is None else tuple(content_C)
    return StreamReward(tuple(value_C), answers, compression, tuple(calls_C), content_C)


def calls_reward(results: Sequence[Result], config: MemalphaRewardConfig) -> float:
    """r2 of one chunk: the share of calls that were executed and not skipped; 0 without calls."""
    worked = [result.status is Status.OK and (config.count_idle_deletes or not result.idle) for result in results]
    return sum(worked) / len(worked) if worked else 0.0


def content_reward(verdicts: Sequence[bool]) -> float:
    """r4 of one chunk: the share of valid contents among all parsed calls, deletes and failures included; 0 without.

    `verdicts` holds one entry for each call; a call without content to judge is not valid.
    """
    return sum(verdicts) / len(verdicts) if verdicts else 0.0


def compression_reward(memory_tokens: int, stream_tokens: int, *, clip: bool = True) -> float:
    """r3: 1 - memory / stream, 1 for an empty memory. Raises ValueError for an empty stream."""
    if stream_tokens <= 0:
        raise ValueError(f"a stream of {stream_tokens} tokens has no compression: leave out streams without text")
    compression = 1 - memory_tokens / stream_tokens
    return min(max(compression, 0.0), 1.0) if clip else compression


def needs_judge(source: str, *, evaluation: bool = False) -> bool:
    """Whether answers to this source's questions are scored by a judge's reply."""
    return source == "lme_train" or (evaluation and source == "longmemeval_s*")


def question_score(
    source: str, prediction: str, gold: Gold, judge_reply: str | None = None, *, evaluation: bool = False
) -> float:
    """The score in [0, 1] of one answer, by the rule of its data source.

    In evaluation two benchmark sources have rules of their own. Raises ValueError where the rule needs the reply of a
    judge and there is none: a missing judge is a fault, not a wrong answer.
    """
    answer = _after_thoughts(prediction)
    if needs_judge(source, evaluation=evaluation):
        if judge_reply is None:
            raise ValueError(f"answers of {source} are scored by a judge, and its reply is missing")
        return float(judge_agrees(judge_reply))
    if source == "booksum" or (evaluation and source == "infbench_sum_eng_shots2"):
        return _keyword_share(answer, gold)
    if source == "pubmed-rct" or "ttl_train" in source or "icl" in source:
        return float(_same_number(answer, gold))
    if source == "perltqa":
        return _part_share(answer, str(gold))
    if source in ("squad", "hotpotqa"):
        wanted = _first_text(gold)
        return float(bool(wanted) and wanted.lower() in answer.lower())
    if "eventqa" in source:
        return float(len(gold) > 0 and all(str(element).lower() in answer.lower() for element in gold))
    if "infbench" in source:
        return best_metrics(answer, gold)["rougeL_f1"]
    if "detectiveqa" in source:
        return float(_boxed(answer) in _texts(gold))
    return best_metrics(answer, gold, _COVER)["substring_exact_match"]


def judge_agrees(reply: str) -> bool:
    """Whether a yes-or-no judge said yes and denied nothing. Whole words count, so that `know` is no `no`."""
    said = set(_WORDS.findall(reply.lower()))
    return "yes" in said and said.isdisjoint(("no", "not"))


def short_answer(prediction: str) -> str:
    """What a decorated text answers: `<answer>`, else the first box, else all of it.

    A box ends at its first closing brace, as in the original's reward.
    """
    for pattern in (_ANSWER_TAG, *_BOXES):
        if found := pattern.search(prediction):
            return found[1].strip()
    return prediction.strip()


def answer_line(prediction: str) -> str:
    """What follows the first `Answer:` on its line, else the first line."""
    found = _ANSWER_LINE.search(prediction)
    line = found[1] if found else prediction.partition("\n")[0]
    line = line.strip()
    return line[len("answer:") :].strip() if line.lower().startswith("answer:") else line


_COVER: dict[str, Callable[[str, str], float]] = {"substring_exact_match": cover_exact_match}
METRICS: dict[str, Callable[[str, str], float]] = {
    "exact_match": exact_match,
    "f1": token_f1,
    **_COVER,
    "rougeL_f1": lambda prediction, golden: rouge_l(prediction, golden).f1,
    "rougeL_recall": lambda prediction, golden: rouge_l(prediction, golden).recall,
    "rougeLsum_f1": lambda prediction, golden: rouge_l_sum(prediction, golden).f1,
    "rougeLsum_recall": lambda prediction, golden: rouge_l_sum(prediction, golden).recall,
}
"""The answer metrics of MemoryAgentBench, each of a prediction and one golden answer, in [0, 1]."""


def answer_metrics(
    prediction: str, gold: Gold, metrics: dict[str, Callable[[str, str], float]] = METRICS
) -> dict[str, float]:
    """Each metric's maximum over the golden answers; 0 where there are none."""
    texts = _texts(gold)
    return {name: max((metric(prediction, text) for text in texts), default=0.0) for name, metric in metrics.items()}


def best_metrics(
    prediction: str, gold: Gold, metrics: dict[str, Callable[[str, str], float]] = METRICS
) -> dict[str, float]:
    """The better of the whole prediction and of its `answer_line`, for each metric on its own."""
    whole, line = (answer_metrics(text, gold, metrics) for text in (prediction, answer_line(prediction)))
    return {name: max(whole[name], line[name]) for name in metrics}


def _after_thoughts(prediction: str) -> str:
    """The text behind a thought; a thought that is still open answers nothing."""
    if "</think>" in prediction:
        prediction = prediction.split("</think>")[1].strip()
    return "Empty" if "<think>" in prediction else prediction


def _texts(gold: Gold) -> list[str]:
    """All golden answers, lists within a list spread out."""
    if not isinstance(gold, list):
        return [str(gold)]
    return [str(text) for entry in gold for text in (entry if isinstance(entry, list) else [entry])]


def _first_text(gold: Gold) -> str:
    if isinstance(gold, list):
        return str(gold[0]) if gold else ""
    return str(gold.get("text", gold)) if isinstance(gold, dict) else str(gold)


def _keyword_share(answer: str, gold: Gold) -> float:
    """Share of the keywords that stand in the answer. An empty one between commas is found, as in the original."""
    keywords = [str(word).strip().lower() for word in (gold if isinstance(gold, list) else str(gold).split(","))]
    if not any(keywords):
        return 0.0
    return sum(keyword in answer.lower() for keyword in keywords) / len(keywords)


def _part_share(answer: str, gold: str) -> float:
    parts = [part.strip() for part in gold.split(";")] if ";" in gold else [gold]
    return sum(part.lower() in answer.lower() for part in parts) / len(parts)


def _same_number(answer: str, gold: Gold) -> bool:
    """Whether the answer is digits and nothing else, and exactly the gold: `03` is not `3`."""
    found, wanted = (text.strip("\"'").strip() for text in (short_answer(answer), _first_text(gold)))
    return re.fullmatch(r"\d+", found) is not None and found == wanted


def _boxed(answer: str) -> str:
    """As `short_answer`, but braces within the box pair up."""
    if found := _ANSWER_TAG.search(answer):
        return found[1].strip()
    for opening in ("\\boxed{", "\\box{"):
        _, opened, rest = answer.partition(opening)
        depth = 1
        for position, letter in enumerate(rest if opened else ""):
            depth += {"{": 1, "}": -1}.get(letter, 0)
            if depth == 0:
                return rest[:position].strip()
    return answer.strip()
