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

_WORD, _SPACELESS, _ARTICLE = re.compile(r"\w+"), re.compile(f"[{SPACELESS}]"), re.compile("^ (?:the|an?) ")


@dataclass(frozen=True)
class Audited:
    """Where one question's answer and titles are. Ranks count from 0; None: not among the first `DEPTHS[-1]`."""

    problem: Problem
    in_corpus: bool | None  # whether a passage holds a golden answer; None: the corpus is not known, or yes and no
    missing_titles: tuple[str, ...]  # that no passage has; () too where the corpus is not known
    answer_rank: dict[str, int | None]  # by query
    title_ranks: dict[str, tuple[int | None, ...]]

    @property
    def is_hopeless(self) -> bool:
        return self.in_corpus is False or bool(self.missing_titles)

    @property
    def has_worded_answer(self) -> bool:
        return bool(_needles(self.problem))

    def row(self) -> dict[str, Any]:
        """A line of the file of hopeless questions, which `data.exclude` reads."""
        reasons = ["no passage holds an answer"] * (self.in_corpus is False)
        reasons += [f"no passage has the title {title!r}" for title in self.missing_titles]
        golden = list(self.problem.golden_answers)
        return {"id": self.problem.id, "question": self.problem.question, "golden_answers": golden, "reasons": reasons}


def audit(
    problems: Sequence[Problem],
    searcher: Searcher,
    passages: Iterable[Passage] | None,
    on_passages: Callable[[int], None] = lambda read: None,
    on_questions: Callable[[int], None] = lambda searched: None,
) -> list[Audited]:
    """Read the whole corpus once, and search every question and its oracle query; `passages` None: it is not known.

    The callbacks receive numbers so far. Raises as `Searcher.search`.
    """
    needles = {needle for problem in problems for needle in _needles(problem)}
    titles = {title: _normal(title) for problem in problems for title in problem.supporting_titles}
    held, present = (set(), set()) if passages is None else _scan(passages, needles, set(titles.values()), on_passages)
    audited = []
    for start in range(0, len(problems), MAX_BATCH):
        batch = problems[start : start + MAX_BATCH]
        found = [
            searcher.search([problem.question for problem in batch], DEPTHS[-1]),
            searcher.search([oracle_query(problem) for problem in batch], DEPTHS[-1]),
        ]
        for problem, *rankings in zip(batch, *found, strict=True):
            wanted = _needles(problem)
            missing = () if passages is None else problem.supporting_titles
            audited.append(
                Audited(
                    problem,
                    None if passages is None or not wanted else bool(held & set(wanted)),
                    tuple(title for title in missing if titles[title] not in present),
                    {query: _answer_rank(wanted, hits) for query, hits in zip(QUERIES, rankings, strict=True)},
                    {
                        query: tuple(_title_rank(titles[title], hits) for title in problem.supporting_titles)
                        for query, hits in zip(QUERIES, rankings, strict=True)
                    },
                )
            )
        on_questions(len(audited))
    return audited


def oracle_query(problem: Problem) -> str:
    """The query of somebody who knows where the answer is."""
    return " ".join((*(problem.supporting_titles or (problem.question,)), problem.golden_answers[0]))


def summarize(audited: Sequence[Audited]) -> dict[str, Any]:
    """Counts of questions, and for answers and titles the shares that are in the corpus and in the first results.

    Shares of titles are means over the questions that have titles. None: there is no such question.
    """
    worded = [one for one in audited if one.has_worded_answer]
    known = [one for one in worded if one.in_corpus is not None]
    titled = [one for one in audited if one.problem.supporting_titles]
    answers = {"corpus": _mean([bool(one.in_corpus) for one in known])}
    titles = {"corpus": _mean([1 - len(one.missing_titles) / len(one.problem.supporting_titles) for one in titled])}
    for query in QUERIES:
        for depth in DEPTHS:
            name = f"{query}@{depth}"
            answers[name] = _mean([_within(one.answer_rank[query], depth) for one in worded])
            ranks = [one.title_ranks[query] for one in titled]
            titles[name] = _mean([_mean([_within(rank, depth) for rank in each]) or 0.0 for each in ranks])
    if not known:  # of a search service
        titles["corpus"] = None
    hopeless = sum(one.is_hopeless for one in audited)
    counts = {"questions": len(audited), "with_titles": len(titled), "hopeless": hopeless}
    return {**counts, "answers": answers, "titles": titles}


def _scan(
    passages: Iterable[Passage], needles: set[str], titles: set[str], on_passages: Callable[[int], None]
) -> tuple[set[str], set[str]]:
    """The needles that a passage holds, and the titles that a passage has. A needle that was found is not sought on."""
    by_word: dict[str, set[str]] = defaultdict(set)
    for needle in needles:
        by_word["" if _SPACELESS.search(needle) else max(needle.split(), key=len)].add(needle)
    held, present = set[str](), set[str]()
    for number, passage in enumerate(passages, start=1):
        text = _normal(passage.contents)
        for word in by_word.keys() & {"", *text.split()}:
            here = {needle for needle in by_word[word] if needle in text}
            held |= here
            by_word[word] -= here
            if not by_word[word]:
                del by_word[word]
        title = _normal(passage.title)
        if title in titles:
            present.add(title)
        if number % PROGRESS_PASSAGES == 0:
            on_passages(number)
    return held, present


def _normal(text: str) -> str:
    return f" {' '.join(_WORD.findall(fold(text)))} "


def _needles(problem: Problem) -> list[str]:
    """The golden answers as `_normal` writes them; between the words of a script without spaces there are none."""
    normal = dict.fromkeys(_ARTICLE.sub(" ", _normal(answer)) for answer in problem.golden_answers)
    worded = [answer for answer in normal if answer.strip() and answer not in WORDLESS_ANSWERS]
    return [answer.strip() if _SPACELESS.search(answer) else answer for answer in worded]


def _answer_rank(needles: Sequence[str], hits: Sequence[Passage]) -> int | None:
    texts = (_normal(passage.contents) for passage in hits)
    return next((rank for rank, text in enumerate(texts) if any(needle in text for needle in needles)), None)


def _title_rank(title: str, hits: Sequence[Passage]) -> int | None:
    return next((rank for rank, passage in enumerate(hits) if _normal(passage.title) == title), None)


def _within(rank: int | None, depth: int) -> bool:
    return rank is not None and rank < depth


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
