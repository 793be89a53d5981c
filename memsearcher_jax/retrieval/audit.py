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
        reasons = ["no passage holds an answer"] * (self.answers["corpus"] == 0)
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
    is_known = passages is not None
    held, present = _scan(passages or (), needles, set(titles.values()), on_passages)
    audited = []
    for start in range(0, len(problems), MAX_BATCH):
        batch = problems[start : start + MAX_BATCH]
        asked = [problem.question for problem in batch], [oracle_query(problem) for problem in batch]
        found = [searcher.search(queries, DEPTHS[-1]) for queries in asked]
        for problem, *rankings in zip(batch, *found, strict=True):
            wanted, named = _needles(problem), [titles[title] for title in problem.supporting_titles]
            missing = tuple(one for one in problem.supporting_titles if is_known and titles[one] not in present)
            answers = {"corpus": float(bool(held & set(wanted))) if is_known and wanted else None}
            shares = {"corpus": 1 - len(missing) / len(named) if is_known and named else None}
            for query, hits in zip(QUERIES, rankings, strict=True):
                found_titles = [_normal(passage.title) for passage in hits]
                texts = [_normal(passage.contents) for passage in hits]
                for depth in DEPTHS:
                    answered = any(needle in text for text in texts[:depth] for needle in wanted)
                    answers[f"{query}@{depth}"] = float(answered) if wanted else None
                    shares[f"{query}@{depth}"] = _mean([float(title in found_titles[:depth]) for title in named])
            audited.append(Audited(problem, answers, shares, missing))
        on_questions(len(audited))
    return audited


def oracle_query(problem: Problem) -> str:
    """The query of somebody who knows where the answer is."""
    return " ".join((*(problem.supporting_titles or (problem.question,)), problem.golden_answers[0]))


def summarize(audited: Sequence[Audited]) -> dict[str, Any]:
    """Counts of questions, and by place the means of what is known of them; None: nothing is."""
    answers, titles = [one.answers for one in audited], [one.titles for one in audited]
    return {
        "questions": len(audited),
        "with_titles": sum(bool(one.problem.supporting_titles) for one in audited),
        "hopeless": sum(one.is_hopeless for one in audited),
        "answers": {place: _mean([one[place] for one in answers]) for place in answers[0]},
        "titles": {place: _mean([one[place] for one in titles]) for place in titles[0]},
    }


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


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
