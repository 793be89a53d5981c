"""What makes a question worth training on, checked in its text. The writer checks the rest, see `making`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memsearcher_jax import analyzer
from memsearcher_jax.data.questions import is_choice
from memsearcher_jax.questions.evidence import Evidence
from memsearcher_jax.types import Problem

MAX_ANSWER_WORDS = 8
MAX_QUESTION_WORDS = 60
ALIKE = 0.8  # share of words that two questions have in common, of all their words
NAMES_ITS_TEXT = re.compile(
    r"\b(?:(?:the|this|that|these|given|above|following)\s+(?:\w+\s+)?(?:passages?|texts?|documents?|excerpts?|"
    r"paragraphs?|context|snippets?|sections?)|passages?\s+\d|according to (?:the|this)\b|mentioned (?:above|here))",
    re.IGNORECASE,
)

REASONS = {
    "failed": "the writer's service failed; the same command tries again",
    "unreadable": "the writer's reply holds no question and answer",
    "answer_not_in_passages": "the answer is in none of its passages",
    "answer_too_long": f"the answer has more than {MAX_ANSWER_WORDS} words, or the question {MAX_QUESTION_WORDS}",
    "names_its_text": 'the question mentions "the passage"',
    "can_be_guessed": "the answer is yes, no or in the question",
    "alike": "a question before it asks the same",
    "known": "it is answered without a search",
    "one_passage_suffices": "one of its passages suffices to answer it",
    "not_found": "the search does not find its pages",
    "changed": "its passages have changed or are gone",
    "struck": "it was struck out by hand",
}
"""Why a candidate is no question of the result, in the order of the checks."""


def text_reason(question: str, answer: str, evidence: Evidence) -> str:
    """The reason in REASONS against the text, or ""."""
    answer_words = f" {' '.join(analyzer.words(answer))} "
    texts = [f" {' '.join(analyzer.words(passage.contents))} " for passage in evidence.passages]
    if not answer_words.strip() or not any(answer_words in text for text in texts):
        return "answer_not_in_passages"
    if len(answer.split()) > MAX_ANSWER_WORDS or len(question.split()) > MAX_QUESTION_WORDS:
        return "answer_too_long"
    if NAMES_ITS_TEXT.search(question):
        return "names_its_text"
    if is_choice(Problem("", question, (answer,))):
        return "can_be_guessed"
    return ""


@dataclass(frozen=True)
class QuestionWords:
    """The words of a question and of its answer."""

    question: frozenset[str]
    answer: tuple[str, ...]

    def is_like(self, other: QuestionWords) -> bool:
        """Whether both ask the same: with the same words, or with nearly the same for the same answer.

        One name makes another question: "Where was Ada born?" is not like "Where was Bo born?".
        """
        if self.question == other.question:
            return True
        shared = len(self.question & other.question)
        return self.answer == other.answer and shared >= ALIKE * len(self.question | other.question)


def words_of(question: str, answer: str) -> QuestionWords:
    return QuestionWords(frozenset(analyzer.words(question)), tuple(analyzer.words(answer)))


def is_answered(reply: str, answer: str) -> bool:
    """Whether the words of the answer are in a reply, one after the other."""
    return f" {' '.join(analyzer.words(answer))} " in f" {' '.join(analyzer.words(reply))} "
