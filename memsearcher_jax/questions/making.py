"""The loop that makes questions: the writer writes, filters strike, and every candidate is kept in a log.

The log is appended after each batch, so that a writer that is slow, answers nothing or is killed costs no finished
question; the same command continues. A candidate that failed because of the service is tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from memsearcher_jax.jsonl import numbered_lines, parse_object
from memsearcher_jax.questions.evidence import CorpusPassage, Evidence
from memsearcher_jax.questions.filters import QuestionWords, is_answered, text_reason, words_of
from memsearcher_jax.questions.log import Candidate, Log
from memsearcher_jax.questions.writer import Writer, answer_prompt, parse, write_prompt
from memsearcher_jax.retrieval import audit
from memsearcher_jax.retrieval.search import Searcher
from memsearcher_jax.types import Passage, Prompt

FOUND_AT = "@20"  # the results of a question or its oracle query in which its pages must be
RETRIED = {"failed"}


class WriterDown(OSError):
    """The service answers nothing. Finished candidates are in the log."""


@dataclass(frozen=True)
class Maker:
    """Makes questions from evidence until there are enough."""

    writer: Writer  # writes, and answers from a passage
    examinee: Writer  # the same model, sampled: it answers without passages
    searcher: Searcher
    draws: int  # answers of the examinee to each question
    batch: int

    def make(
        self,
        evidence: Iterator[Evidence],
        log: Log,
        count: int,
        max_candidates: int,
        on_batch: Callable[[int, int], None] = lambda tried, passed: None,
    ) -> None:
        """Append to the log until `count` questions passed, `max_candidates` were tried now, or evidence is used up.

        After each batch, `on_batch` gets the number of its candidates and of all that passed. Raises WriterDown if the
        service fails for a whole batch.
        """
        earlier = [words_of(candidate.question, candidate.answer) for candidate in log.passed()]
        tried = 0
        waiting = (unit for unit in evidence if not _is_done(log, unit))
        while len(log.passed()) < count and tried < max_candidates:
            batch = list(islice(waiting, min(self.batch, max_candidates - tried)))
            if not batch:
                return
            tried += len(batch)
            finished = self._checked(batch, self._write(batch), earlier)
            log.add(finished)
            on_batch(len(batch), len(log.passed()))
            failures = [candidate for candidate in finished if candidate.reason == "failed"]
            if len(failures) == len(finished):
                raise WriterDown(f"{failures[0].detail}; the same command continues")

    def _write(self, batch: Sequence[Evidence]) -> list[Candidate]:
        written = list[Candidate]()
        completions = self.writer.ask([write_prompt(unit) for unit in batch])
        for unit, completion in zip(batch, completions, strict=True):
            candidate = _candidate(unit)
            found = parse(completion.text)
            if completion.error:
                candidate = replace(candidate, reason="failed", detail=completion.error)
            elif found is None:
                candidate = replace(candidate, reason="unreadable", detail=completion.text[:500])
            else:
                candidate = replace(candidate, question=found.question, answer=found.answer)
                candidate = replace(candidate, reason=text_reason(found.question, found.answer, unit))
            written.append(candidate)
        return written

    def _checked(
        self, batch: Sequence[Evidence], candidates: Sequence[Candidate], earlier: list[QuestionWords]
    ) -> list[Candidate]:
        """The candidates after the checks that need other questions, the writer or the search."""
        checked = list(candidates)
        for number, candidate in enumerate(checked):
            if candidate.reason:
                continue
            words = words_of(candidate.question, candidate.answer)
            if any(words.is_like(other) for other in earlier):
                checked[number] = replace(candidate, reason="alike")
            else:
                earlier.append(words)
        self._strike_known(checked)
        self._strike_single(checked, batch)
        unstruck = [number for number, candidate in enumerate(checked) if not candidate.reason]
        audited = audit.audit([checked[number].problem for number in unstruck], self.searcher, None)
        for number, question in zip(unstruck, audited, strict=True):
            if not any(question.titles[query + FOUND_AT] == 1 for query in audit.QUERIES):
                checked[number] = replace(checked[number], reason="not_found")
        return checked

    def _strike_known(self, checked: list[Candidate]) -> None:
        """Strike what the examinee answers without passages in one of its draws."""
        for draw in range(self.draws):
            unstruck = [number for number, candidate in enumerate(checked) if not candidate.reason]
            replies = self.examinee.ask([answer_prompt(checked[number].question) for number in unstruck], draw)
            for number, reply in zip(unstruck, replies, strict=True):
                self._strike(checked, number, reply.text, reply.error, "known")

    def _strike_single(self, checked: list[Candidate], batch: Sequence[Evidence]) -> None:
        """Strike questions of several passages that the writer answers from one of them."""
        numbers = list[int]()
        passages = list[Passage]()
        for number, (candidate, unit) in enumerate(zip(checked, batch, strict=True)):
            if not candidate.reason and unit.hops > 1:
                for passage in unit.passages:
                    numbers.append(number)
                    passages.append(passage)
        prompts = list[Prompt]()
        for number, passage in zip(numbers, passages, strict=True):
            prompts.append(answer_prompt(checked[number].question, passage))
        replies = self.writer.ask(prompts)
        for number, reply in zip(numbers, replies, strict=True):
            self._strike(checked, number, reply.text, reply.error, "one_passage_suffices")

    def _strike(self, checked: list[Candidate], number: int, text: str, error: str, reason: str) -> None:
        candidate = checked[number]
        if candidate.reason:
            return
        if error:  # unchecked: the same command tries again
            checked[number] = replace(candidate, reason="failed", detail=error)
        elif is_answered(text, candidate.answer):
            checked[number] = replace(candidate, reason=reason, detail=text[:500])


def read_corpus(file: Path) -> list[CorpusPassage]:
    """The passages of a corpus with their documents. Raises FileNotFoundError or ValueError, in one line."""
    from memsearcher_jax.retrieval.corpus import read_passages

    sources = list[str]()
    for where, line in numbered_lines(file):
        metadata = parse_object(where, line).get("metadata")
        source = metadata.get("source") if isinstance(metadata, dict) else None
        sources.append(source if isinstance(source, str) else "")
    passages = [passage for _, passage in read_passages(file)]
    return [CorpusPassage(passage, source or passage.title) for passage, source in zip(passages, sources, strict=True)]


def _is_done(log: Log, evidence: Evidence) -> bool:
    candidate = log.candidates.get(evidence.key)
    return candidate is not None and candidate.reason not in RETRIED


def _candidate(evidence: Evidence) -> Candidate:
    return Candidate(
        evidence.key,
        evidence.split,
        evidence.hops,
        [passage.id for passage in evidence.passages],
        list(dict.fromkeys(passage.title for passage in evidence.passages)),
    )
