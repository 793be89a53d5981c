"""How answers about long conversations are scored, and how much of their evidence a memory keeps.

LongMemEval (Wu et al., ICLR 2025) asks a judge, with a rule for some types of question; `JUDGE_RULES` says in our words
what the rules of its `evaluate_qa.py` say. LoCoMo (Maharana et al., ACL 2024) has no judge: `locomo_score` is the rule
of its `task_eval/evaluation.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

from memsearcher_jax.agent.reward import normalize

LONGMEMEVAL = "longmemeval"
LOCOMO = "locomo"
ABSTENTION = "abstention"
JUDGE_RULES = {
    "temporal-reasoning": "A number of days, weeks or months that is off by one is correct.",
    "knowledge-update": "An answer that also names an earlier value is correct if it gives the present one as such.",
    "single-session-preference": "What is called the correct answer is a rubric. The answer need not meet every point "
    "of it: it is correct if it recalls what the user has said of themselves, and uses it well.",
    ABSTENTION: "The question cannot be answered, and what is called the correct answer explains why. The answer is "
    "correct if it says that the information is missing or incomplete.",
}
"""Rules for the judge of LongMemEval, by the type of the question."""
_ABSTENTION_SUFFIX = "_abs"  # of the kind of a question to abstain from, after its type

_ABSTAINS = ("no information available", "not mentioned")
_AND = re.compile(r"\band\b")
_WORD = re.compile(r"\w+")


def judge_rule(source: str, kind: str) -> str:
    """The rule for a question of this source and kind, empty where there is none."""
    return JUDGE_RULES.get(question_types(kind)[-1], "") if source == LONGMEMEVAL else ""


def question_types(kind: str) -> tuple[str, ...]:
    """The types that count a question of this kind.

    As in LongMemEval's `print_qa_metrics.py`, a question to abstain from counts in its type and as abstention.
    """
    kept = kind.removesuffix(_ABSTENTION_SUFFIX)
    return (kept,) if kept == kind else (kept, ABSTENTION)


def locomo_score(answer: str, gold: str, kind: str) -> float:
    """The score in [0, 1] of one answer, by the category of its question.

    adversarial: whether the answer says that the conversation does not mention it. multi-hop: for each of the golden
    answers between commas the best F1 of a part of the answer between commas, averaged. Otherwise F1, in open-domain
    with the first of the golden answers between semicolons. F1 is over Porter stems.
    """
    if kind == "adversarial":
        return float(any(phrase in answer.lower() for phrase in _ABSTAINS))
    if kind == "multi-hop":
        parts = answer.split(",")
        best = [max(_stem_f1(part, expected) for part in parts) for expected in gold.split(",")]
        return sum(best) / len(best)
    return _stem_f1(answer, gold.partition(";")[0] if kind == "open-domain" else gold)


def evidence_recall(memory: str, evidence: Sequence[str]) -> float:
    """The fraction of the evidence's pairs of neighbouring words that are in the memory, which may reword the rest."""
    kept = set(_word_pairs(memory))
    pairs = [pair for text in evidence for pair in _word_pairs(text)]
    return sum(pair in kept for pair in pairs) / len(pairs) if pairs else 0.0


def _word_pairs(text: str) -> list[tuple[str, str]]:
    return list(pairwise(_WORD.findall(text.lower())))


def _stem_f1(answer: str, gold: str) -> float:
    given = _stems(answer)
    expected = _stems(gold)
    common = (given & expected).total()
    return 2 * common / (given.total() + expected.total()) if common else 0.0


def _stems(text: str) -> Counter[str]:
    words = _AND.sub(" ", normalize(text)).split()
    return Counter(map(_stem, words))


@cache
def _stem(word: str) -> str:
    from nltk.stem import PorterStemmer  # NLTK takes more than half a second to import

    return PorterStemmer().stem(word)
