"""Which questions a corpus cannot answer: the part of launch/build_index.py that --audit runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from memsearcher_jax.config import RunConfig
from memsearcher_jax.data.config import DataConfig
from memsearcher_jax.data.problems import load
from memsearcher_jax.data.synthetic.encyclopedia import make_encyclopedia
from memsearcher_jax.jsonl import encode_line
from memsearcher_jax.launch import preconditions
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.progress import announced
from memsearcher_jax.report.console import make_table, safe_text
from memsearcher_jax.retrieval import audit
from memsearcher_jax.retrieval.index import open_index_corpus
from memsearcher_jax.retrieval.search import open_searcher
from memsearcher_jax.runs.run_dir import INDEX
from memsearcher_jax.types import Problem

SPLITS = ("train", "test")


def audit_questions(
    run: RunConfig, entries: Sequence[str], out: Path, on_progress: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """Prints by benchmark where the answers are, writes the hopeless questions to `out`, and returns the numbers.

    `on_progress` receives a step, the items done and their total, which is 0 if unknown.
    """
    config = run.retrieval
    data = run.data
    problems = [problem for problem in read_questions(data, entries, out / "data") if problem.golden_answers]
    if not problems:
        raise ValueError(f"--audit {' '.join(entries)}: there are no questions with answers: name files of questions")
    synthetic = make_encyclopedia(data.encyclopedia).passages
    with announced("opening the index"):
        searcher = open_searcher(config, out / INDEX, synthetic, preconditions.load_encoder)
    audited = audit.audit(
        problems,
        searcher,
        None if config.url else open_index_corpus(Path(config.index or out / INDEX)),
        lambda read: on_progress("reading passages", read, 0),
        lambda searched: print(f"searched {searched:,} of {len(problems):,} questions", file=sys.stderr, flush=True),
    )
    groups: dict[str, list[audit.Audited]] = {}
    for question in audited:
        source = str(question.problem.metadata.get("source", "questions"))
        groups.setdefault(source, []).append(question)
    result = {name: audit.summarize(group) for name, group in groups.items()}
    hopeless = [question.row() for question in audited if question.is_hopeless]
    atomic_write(out / "hopeless.jsonl", "".join(map(encode_line, hopeless)).encode())
    show(result)
    print(f"{out / 'hopeless.jsonl'}: {len(hopeless)} of {len(audited)} questions, to leave out with --data.exclude")
    return result


def read_questions(data: DataConfig, entries: Sequence[str], directory: Path) -> list[Problem]:
    """The questions of the entries; train and test are those of the settings."""
    data = replace(data, objectives=1)  # data.exclude names single questions, too
    others = tuple(entry for entry in entries if entry not in SPLITS)
    settings_and_splits = [(data, entry) for entry in entries if entry in SPLITS]
    if others:
        settings_and_splits.append((replace(data, train=(), exclude="", test=others), "test"))
    problems: list[Problem] = []
    for config, split in settings_and_splits:
        preconditions.print_skipped(splits := load(config, directory))
        problems += getattr(splits, split)
    return problems


def show(result: dict[str, Any]) -> None:
    """Tables of answers and of titles, with two rows for each benchmark: of the question and of its oracle query."""
    depths = [f"@{depth}" for depth in audit.DEPTHS]
    for what in ("answers", "titles"):
        table = make_table(what, "query", "questions", "hopeless", "corpus", *depths, left=("query",))
        for name, group in result.items():
            counts = [f"{group['questions']:,}", f"{group['hopeless']:,}"]
            for query in audit.QUERIES:
                shares = [group[what][column] for column in ("corpus", *(query + depth for depth in depths))]
                cells = ["–" if share is None else f"{100 * share:.1f}" for share in shares]
                table.add_row(safe_text(name), query, *counts, *cells)
        Console().print(table, "")
    print("percent of the questions, and of their titles, that are in the corpus and in the first results")
