"""The candidates of a folder of questions: one line for each that was written or tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from memsearcher_jax.jsonl import encode_line, numbered_lines, parse_object
from memsearcher_jax.questions.evidence import SPLITS, CorpusPassage, Evidence
from memsearcher_jax.questions.filters import REASONS
from memsearcher_jax.types import Problem

LOG = "candidates.jsonl"


@dataclass(frozen=True)
class Candidate:
    """A question that was written, or tried; a line of the log."""

    key: str  # of its evidence
    split: str
    hops: int
    supporting_ids: list[str]
    supporting_titles: list[str]
    question: str = ""
    answer: str = ""
    reason: str = ""  # a key of REASONS; "" for a question that passed
    detail: str = ""  # such as the error or the reply that could not be read

    @property
    def problem(self) -> Problem:
        metadata = {"supporting_titles": self.supporting_titles, "supporting_ids": self.supporting_ids}
        return Problem(f"{self.hops}hop_{self.key}", self.question, (self.answer,), {"hops": self.hops, **metadata})


@dataclass
class Log:
    """The candidates of a folder, in the order in which they were finished."""

    file: Path
    candidates: dict[str, Candidate] = field(default_factory=dict)  # by key

    @classmethod
    def open(cls, folder: Path) -> Log:
        """Reads what is there. A last line that was cut by a kill is removed."""
        log = cls(folder / LOG)
        if not log.file.exists():
            return log
        content = log.file.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        if complete != content:
            log.file.write_bytes(complete)
        if not complete:
            return log
        for where, line in numbered_lines(log.file):
            candidate = Candidate(**parse_object(where, line))
            log.candidates[candidate.key] = candidate
        return log

    def add(self, candidates: Iterable[Candidate]) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            for candidate in candidates:
                file.write(encode_line(asdict(candidate)))
                self.candidates[candidate.key] = candidate

    def match(self, corpus: Sequence[CorpusPassage], evidence: Iterable[Evidence]) -> None:
        """Give each candidate the ids that its passages have in the corpus now; mark those whose passages changed.

        The file is not changed, so that a text that comes back has its questions again.
        """
        passages = {entry.passage.id: entry.passage for entry in corpus}
        units = {unit.key: unit for unit in evidence}
        for key, candidate in self.candidates.items():
            found = tuple(passages[passage_id] for passage_id in candidate.supporting_ids if passage_id in passages)
            if Evidence(found, candidate.split).key == key:
                continue
            if key in units:
                ids = [passage.id for passage in units[key].passages]
                self.candidates[key] = replace(candidate, supporting_ids=ids)
            elif not candidate.reason:
                self.candidates[key] = replace(candidate, reason="changed")

    def passed(self, struck: frozenset[str] = frozenset()) -> list[Candidate]:
        return [
            candidate
            for candidate in self.candidates.values()
            if not candidate.reason and candidate.problem.id not in struck
        ]

    def counts(self, struck: frozenset[str] = frozenset()) -> dict[str, int]:
        """How many candidates each filter struck, in the order of REASONS."""
        reasons = Counter(candidate.reason for candidate in self.candidates.values() if candidate.reason)
        reasons["struck"] = len(self.passed()) - len(self.passed(struck))
        return {reason: reasons[reason] for reason in REASONS if reasons[reason]}


def rows_by_split(candidates: Sequence[Candidate]) -> Mapping[str, list[dict[str, Any]]]:
    """The questions in FlashRAG's layout, by split."""
    rows: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for candidate in candidates:
        problem = candidate.problem
        row = {"id": problem.id, "question": problem.question, "golden_answers": list(problem.golden_answers)}
        rows[candidate.split].append({**row, "metadata": problem.metadata})
    return rows
