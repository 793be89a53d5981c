"""Does the corpus hold the answer? Where golden answers and supporting titles of questions are, before anyone trains.

A text holds an answer if the answer's words are in it one after the other; case, accents, punctuation and an article at
the beginning make no difference. "yes" and "no" are in no passage: such a question is judged by its titles alone. A
question is hopeless if no passage holds a golden answer, or if a supporting title is not the title of any passage.

The oracle query is the supporting titles and the first golden answer, or without titles the question and that answer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from memsearcher_jax.analyzer import SPACELESS, fold
from memsearcher_jax.retrieval.config import MAX_BATCH
from memsearcher_jax.retrieval.search import Searcher
from memsearcher_jax.types import Passage, Problem

DEPTHS = (5, 20, 100)
QUERIES = ("question", "oracle")
WORDLESS_ANSWERS = {" yes ", " no ", " noanswer "}
PROGRESS_PASSAGES = 10_000

_WORD = re.compile(r"[^\W_]+")
_SPACELESS = re.compile(f"[{SPACELESS}]")
_ARTICLE = re.compile("^ (?:the|an?) ")


@dataclass(frozen=True)
class Audited:
    """Where one question's answer and titles are.

    Places are "corpus" and the first results of a query, "question@5" to "oracle@100". None: of a place that is not
    known, of the answers yes and no, and of a question without titles.
    """

    problem: Problem
    answers: dict[str, float | None]  # by place: 1 if a golden answer is in it
    titles: dict[str, float | None]  # the share of the supporting titles that are titles in it
    missing_titles: tuple[str, ...]  # that no passage has

    @property
    def is_hopeless(self) -> bool:
        return self.answers["corpus"] == 0 or bool(self.missing_titles)

    def row(self) -> dict[str, Any]:
        """A line of the file of hopeless questions, which `data.exclude` reads."""
        reasons = ["no passage holds an answer"] if self.answers["corpus"] == 0 else []
        reasons += [f"no passage has the title {title!r}" for title in self.missing_titles]
        golden = list(self.problem.golden_answers)
        return {"id": self.problem.id, "question": self.problem.question, "golden_answers": golden, "reasons": reasons}


@dataclass(frozen=True)
class CorpusContent:
    """What one pass over the corpus found; it is None everywhere that the corpus is not known."""

    needles: set[str]  # normal forms of answers that a passage holds
    titles: set[str]  # normal forms of titles that a passage has


def audit(
    problems: Sequence[Problem],
    searcher: Searcher | None,
    passages: Iterable[Passage] | None,
    on_passages: Callable[[int], None] = lambda read: None,
    on_questions: Callable[[int], None] = lambda searched: None,
) -> list[Audited]:
    """Read the whole corpus once, and search every question and its oracle query.

    Without `passages` the corpus is not known; without a `searcher` nothing is searched.

    The callbacks receive numbers so far. Raises as `Searcher.search`.
    """
    content = None
    if passages is not None:
        needles = set[str]()
        titles = set[str]()
        for problem in problems:
            needles.update(_needles(problem))
            titles.update(map(_normal, problem.supporting_titles))
        content = _scan(passages, needles, titles, on_passages)
    audited = list[Audited]()
    if searcher is None:
        return [_audit_problem(problem, content, {}) for problem in problems]
    for start in range(0, len(problems), MAX_BATCH):
        batch = problems[start : start + MAX_BATCH]
        of_questions = searcher.search([problem.question for problem in batch], DEPTHS[-1])
        of_oracle = searcher.search([oracle_query(problem) for problem in batch], DEPTHS[-1])
        for problem, question_hits, oracle_hits in zip(batch, of_questions, of_oracle, strict=True):
            hits_by_query = {"question": question_hits, "oracle": oracle_hits}
            audited.append(_audit_problem(problem, content, hits_by_query))
        on_questions(len(audited))
    return audited


def _audit_problem(problem: Problem, content: CorpusContent | None, hits_by_query: dict[str, list[Passage]]) -> Audited:
    needles = _needles(problem)
    normal_titles = [_normal(title) for title in problem.supporting_titles]
    answers: dict[str, float | None] = {"corpus": None}
    titles: dict[str, float | None] = {"corpus": None}
    missing_titles = list[str]()
    if content is not None:
        for title, normal_title in zip(problem.supporting_titles, normal_titles, strict=True):
            if normal_title not in content.titles:
                missing_titles.append(title)
        if needles:
            answers["corpus"] = float(not content.needles.isdisjoint(needles))
        if normal_titles:
            titles["corpus"] = 1 - len(missing_titles) / len(normal_titles)
    for query, hits in hits_by_query.items():
        hit_texts = [_normal(passage.contents) for passage in hits]
        hit_titles = [_normal(passage.title) for passage in hits]
        for depth in DEPTHS:
            place = f"{query}@{depth}"
            is_answered = any(_holds_any(text, needles) for text in hit_texts[:depth])
            answers[place] = float(is_answered) if needles else None
            titles[place] = _mean([float(title in hit_titles[:depth]) for title in normal_titles])
    return Audited(problem, answers, titles, tuple(missing_titles))


def _holds_any(text: str, needles: Sequence[str]) -> bool:
    return any(needle in text for needle in needles)


def oracle_query(problem: Problem) -> str:
    """The query of somebody who knows where the answer is."""
    subjects = problem.supporting_titles or (problem.question,)
    return " ".join([*subjects, problem.golden_answers[0]])


def summarize(audited: Sequence[Audited]) -> dict[str, Any]:
    """Counts of questions, and by place the means of what is known of them; None: nothing is."""
    with_titles = [question for question in audited if question.problem.supporting_titles]
    hopeless = [question for question in audited if question.is_hopeless]
    answers = {}
    titles = {}
    for place in audited[0].answers:
        answers[place] = _mean([question.answers[place] for question in audited])
        titles[place] = _mean([question.titles[place] for question in audited])
    return {
        "questions": len(audited),
        "with_titles": len(with_titles),
        "hopeless": len(hopeless),
        "answers": answers,
        "titles": titles,
    }


def _scan(
    passages: Iterable[Passage], needles: set[str], titles: set[str], on_passages: Callable[[int], None]
) -> CorpusContent:
    """The needles that a passage holds, and the titles that a passage has.

    A needle is sought only in passages that have its longest word; one without spaces between words, in every passage.
    A needle that was found is not sought on.
    """
    needles_by_word: dict[str, set[str]] = defaultdict(set)
    for needle in needles:
        word = "" if _SPACELESS.search(needle) else max(needle.split(), key=len)
        needles_by_word[word].add(needle)
    content = CorpusContent(set(), set())
    for number, passage in enumerate(passages, start=1):
        text = _normal(passage.contents)
        for word in needles_by_word.keys() & {"", *text.split()}:
            found = {needle for needle in needles_by_word[word] if needle in text}
            content.needles.update(found)
            needles_by_word[word] -= found
            if not needles_by_word[word]:
                del needles_by_word[word]
        title = _normal(passage.title)
        if title in titles:
            content.titles.add(title)
        if number % PROGRESS_PASSAGES == 0:
            on_passages(number)
    return content


def _normal(text: str) -> str:
    return f" {' '.join(_WORD.findall(fold(text)))} "


def _needles(problem: Problem) -> list[str]:
    """The golden answers as `_normal` writes them; between the words of a script without spaces there are none."""
    normal = dict.fromkeys(_ARTICLE.sub(" ", _normal(answer)) for answer in problem.golden_answers)
    worded = [answer for answer in normal if answer.strip() and answer not in WORDLESS_ANSWERS]
    return [answer.strip() if _SPACELESS.search(answer) else answer for answer in worded]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
