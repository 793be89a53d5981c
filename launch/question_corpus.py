"""A corpus of the paragraphs of published questions: the part of launch/build_corpus.py that --questions runs."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from memsearcher_jax.data.paragraphs import PublishedQuestions, read_published
from memsearcher_jax.jsonl import encode_line
from memsearcher_jax.launch import corpus_audit
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.progress import announced
from memsearcher_jax.retrieval import audit
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.search import open_searcher
from memsearcher_jax.runs import hub
from memsearcher_jax.types import Passage, Problem

SEARCHED_QUESTIONS = 500
"""Questions of the table; BM25 takes up to a tenth of a second for each."""


def read(names: Sequence[str], malformed: Literal["error", "skip"]) -> PublishedQuestions:
    """The questions of the files, local ones or hf://datasets/OWNER/NAME/FILE. Raises OSError or ValueError."""
    skipped = list[str]()
    with announced() as begin:
        files = list[Path]()
        for name in names:
            begin(f"opening {name}")
            files.append(hub.local_file(name, "--questions"))
        stems = [file.stem for file in files]
        if len(set(stems)) < len(stems):
            raise ValueError("--questions: two files have one name, and their questions are written by it: rename one")
        on_malformed = skipped.append if malformed == "skip" else None
        published = read_published(files, on_malformed, on_file=lambda file: begin(f"reading {file.name}"))
    if skipped:
        print(f"skipped {len(skipped):,} malformed rows; the first: {skipped[0]}", file=sys.stderr)
    if published.without_paragraphs:
        print(f"without paragraphs: {published.without_paragraphs:,} questions", file=sys.stderr)
    return published


def corpus_rows(published: PublishedQuestions) -> list[dict[str, Any]]:
    rows = []
    for passage, file in published.passages():
        rows.append({"id": passage.id, "contents": passage.contents, "metadata": {"source": file.name}})
    return rows


def write_questions(published: PublishedQuestions, corpus: Path) -> list[Path]:
    """Writes the questions of each file beside the corpus, with their supporting titles and without paragraphs."""
    written = []
    for file, problems in published.problems.items():
        out = corpus.with_name(f"{_stem(corpus)}.{file.stem}.jsonl")
        atomic_write(out, "".join(encode_line(_question_row(problem)) for problem in problems).encode())
        written.append(out)
    return written


def verdict(published: PublishedQuestions, corpus: Path) -> dict[str, Any]:
    """Says which questions the corpus cannot answer, writes them beside it, and shows what BM25 finds for some."""
    problems = list[Problem]()
    for of_file in published.problems.values():
        problems += [problem for problem in of_file if problem.golden_answers]
    passages: list[Passage] = [passage for passage, _ in published.passages()]
    with announced("looking for the answers"):
        audited = audit.audit(problems, None, passages)
    hopeless = [question.row() for question in audited if question.is_hopeless]
    step = -(-len(problems) // SEARCHED_QUESTIONS)
    sample = problems[::step]
    with tempfile.TemporaryDirectory() as folder, announced(f"searching {len(sample):,} questions by BM25"):
        searcher = open_searcher(RetrievalConfig(method="bm25"), Path(folder, "index"), passages)
        found = audit.summarize(audit.audit(sample, searcher, passages))
    corpus_audit.show({f"{len(sample):,} of them" if step > 1 else "all": found})
    file = corpus.with_name(f"{_stem(corpus)}.hopeless.jsonl")
    atomic_write(file, "".join(map(encode_line, hopeless)).encode())
    print(f"{file}: {len(hopeless):,} of {len(problems):,} questions, to leave out with --data.exclude")
    return {"questions": len(problems), "hopeless": len(hopeless), "searched": found}


def _question_row(problem: Problem) -> dict[str, Any]:
    return {
        "id": problem.id,
        "question": problem.question,
        "golden_answers": list(problem.golden_answers),
        "metadata": problem.metadata,
    }


def _stem(corpus: Path) -> str:
    return corpus.name.removesuffix(".gz").removesuffix(".jsonl")
