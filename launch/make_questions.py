"""Makes questions about passages of one's own, to train and to measure an agent on: a language model writes them.

python launch/make_questions.py --passages passages.jsonl --out questions --count 500 \\
    --writer.url http://host:8000/v1 --writer.model NAME
python launch/make_questions.py --passages passages.jsonl --out questions --count 500 --writer.checkpoint DIR
"""

from __future__ import annotations

if __name__ == "__main__":
    import memsearcher_jax.launch.__main__  # noqa: F401  (runs `main` below)

import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from memsearcher_jax.jsonl import encode_line
from memsearcher_jax.launch import cli, outputs
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.metric_names import MetricName
from memsearcher_jax.logs.progress import Progress, announced
from memsearcher_jax.questions.config import WriterConfig
from memsearcher_jax.questions.evidence import SPLITS, CorpusPassage, candidates
from memsearcher_jax.questions.filters import REASONS
from memsearcher_jax.questions.log import Candidate, Log, rows_by_split
from memsearcher_jax.ranges import Count, CountOrZero, Hops, Seed
from memsearcher_jax.report.console import make_table
from memsearcher_jax.retrieval.builder.index_builder import build_index
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.search import open_searcher

if TYPE_CHECKING:
    from memsearcher_jax.questions.writer import Writer

REVIEW = "review.md"
STRUCK = re.compile(r"^- \[[xX]\] `([^`]+)`", re.MULTILINE)
MAX_HOPS = 3


@dataclass(frozen=True)
class MakeQuestions:
    """Make questions about passages of one's own."""

    passages: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """The passages, as launch/build_corpus.py writes them."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Directory to write: train.jsonl, tune.jsonl, test.jsonl, and candidates.jsonl, with which the same command
    continues."""
    count: Count = 100
    """Questions to make, of all splits together."""
    max_candidates: CountOrZero = 0
    """Candidates to write in this call, at most: the bound on what it costs. 0: five times --count."""
    hops: tuple[Hops, ...] = (1, 2, 3)
    """Numbers of passages that a question needs, in turn."""
    draws: Count = 3
    """Answers without a passage that the writer gives to each question; one that is right strikes it."""
    review: CountOrZero = 0
    """Write so many of the questions to review.md, with their passages. Those that you mark with an x there are left
    out by the next call."""
    max_tokens: Count = 512
    """Tokens of a reply of the writer, thoughts included."""
    seed: Seed = 0
    """Seed of the order in which passages are used."""
    writer: WriterConfig = field(default_factory=WriterConfig)
    """The language model that writes the questions."""
    json: cli.File = None
    """Also write the result to this file, as JSON."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse_flags(MakeQuestions, argv)
        check(flags)
        if not flags.writer.checkpoint:
            # bm25s imports JAX, which would otherwise claim this host's accelerators.
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        writer, examinee = open_writers(flags)
        flags.out.mkdir(parents=True, exist_ok=True)
        with outputs.output_lock(flags.out):
            outputs.write_json(flags.json, make(flags, writer, examinee))


def check(flags: MakeQuestions) -> None:
    """Raises ValueError or OSError, in one line, for flags that contradict each other."""
    writer = flags.writer
    if writer.backend != "openai":
        raise ValueError(f"--writer.backend {writer.backend}: a service or --writer.checkpoint writes: omit it")
    if writer.checkpoint and (writer.url or writer.model):
        raise ValueError("--writer.checkpoint takes the place of a service: omit --writer.url and --writer.model")
    if not writer.checkpoint and not (writer.url and writer.model):
        raise ValueError("who writes? set --writer.url and --writer.model, or --writer.checkpoint")
    if not flags.hops or max(flags.hops) > MAX_HOPS:
        raise ValueError(f"--hops: a question is of 1 to {MAX_HOPS} passages")
    if flags.out.exists() and not flags.out.is_dir():
        raise NotADirectoryError(f"--out {flags.out} is a file: choose a directory")
    if not flags.passages.is_file():
        raise FileNotFoundError(f"--passages {flags.passages}: no such file")
    outputs.require_writable(flags.out / "train.jsonl", "--out")


def open_writers(flags: MakeQuestions) -> tuple[Writer, Writer]:
    """The language model, greedy and sampled. JAX takes seconds to import; --help and errors do not need it."""
    if flags.writer.checkpoint:
        with announced("loading the checkpoint"):
            from memsearcher_jax.questions.engine_writer import open_engine_writers

            return open_engine_writers(flags.writer, flags.max_tokens, flags.seed)
    from memsearcher_jax.questions.writer import open_service_writers

    return open_service_writers(flags.writer, flags.max_tokens)


def make(flags: MakeQuestions, writer: Writer, examinee: Writer) -> dict[str, Any]:
    """Makes the questions, writes the splits even if the writer fails, and returns the numbers that it prints."""
    from memsearcher_jax.questions.making import Maker, read_corpus

    with announced("reading the passages"):
        corpus = read_corpus(flags.passages)
    log = Log.open(flags.out)
    log.match(corpus, candidates(corpus, range(1, MAX_HOPS + 1), flags.seed))
    review = flags.out / REVIEW
    struck = frozenset(STRUCK.findall(review.read_text(encoding="utf-8"))) if review.exists() else frozenset[str]()
    with announced("indexing the passages"):
        index = flags.out / "index"
        build_index(RetrievalConfig(method="bm25"), flags.passages, index)
        searcher = open_searcher(RetrievalConfig(method="bm25", index=str(index)), index, ())
    maker = Maker(writer, examinee, searcher, flags.draws, batch=2 * flags.writer.max_concurrency)
    struck_count = len(log.passed()) - len(log.passed(struck))
    max_candidates = flags.max_candidates or 5 * flags.count
    try:
        # Of candidates: their number is bounded, and nobody knows how many will pass.
        with Progress("candidates", max_candidates) as progress:

            def on_batch(tried: int, passed: int) -> None:
                progress.advance({MetricName.QUESTIONS: passed - struck_count}, by=tried)

            evidence = candidates(corpus, flags.hops, flags.seed)
            maker.make(evidence, log, flags.count + struck_count, max_candidates, on_batch)
    finally:
        result = write(flags, corpus, log, struck)
        tokens = writer.tokens + examinee.tokens
        print(f"the writer read {tokens['prompt_tokens']:,} tokens and wrote {tokens['completion_tokens']:,}")
    return {**result, "tokens": dict(tokens)}


def write(flags: MakeQuestions, corpus: Sequence[CorpusPassage], log: Log, struck: frozenset[str]) -> dict[str, Any]:
    """Writes the splits and the sheet for review, and prints what became of all candidates."""
    passed = log.passed(struck)
    rows = rows_by_split(passed)
    for split, of_split in rows.items():
        atomic_write(flags.out / f"{split}.jsonl", "".join(map(encode_line, of_split)).encode())
    sheet = flags.out / REVIEW
    if flags.review and not sheet.exists():
        atomic_write(sheet, review_sheet(corpus, passed, flags.review).encode())
        print(f"{sheet}: mark what is to be left out with an x, and repeat the command")
    table = make_table("candidates", "number", "what became of them", left=("candidates", "what became of them"))
    table.add_row("passed", f"{len(passed):,}", ", ".join(f"{split} {len(rows[split]):,}" for split in SPLITS))
    counts = log.counts(struck)
    for reason, number in counts.items():
        table.add_row(reason, f"{number:,}", REASONS[reason])
    Console().print(table)
    hops = {number: sum(candidate.hops == number for candidate in passed) for number in (1, 2, 3)}
    print(f"{flags.out}: {len(passed):,} questions, of 1, 2 and 3 passages: {hops[1]:,}, {hops[2]:,}, {hops[3]:,}")
    return {
        "questions": len(passed),
        "splits": {split: len(of_split) for split, of_split in rows.items()},
        "hops": hops,
        "struck": counts,
        "candidates": len(log.candidates),
    }


def review_sheet(corpus: Sequence[CorpusPassage], passed: Sequence[Candidate], count: int) -> str:
    """Some of the questions as a list to mark, in Markdown."""
    texts = {entry.passage.id: entry.passage.contents for entry in corpus}
    chosen = random.Random(0).sample(passed, min(count, len(passed)))
    lines = ["# Questions to read", "", "Mark what is to be left out: `[x]`.", ""]
    for candidate in chosen:
        lines.append(f"- [ ] `{candidate.problem.id}` **{candidate.question}** {candidate.answer}")
        for passage_id in candidate.supporting_ids:
            text = " ".join(texts.get(passage_id, "").split())
            lines.append(f"  - {passage_id}: {text}")
    return "\n".join(lines) + "\n"
