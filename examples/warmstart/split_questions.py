"""Splits questions into train, tune and test files that share no question and no supporting page.

python -m examples.warmstart.split_questions FILE ... --out DIR --config smollm2 --retrieval.corpus FILE

With a corpus it also makes two-hop questions about its pages, generated_sft.jsonl for the warm start and
generated_rl.jsonl for reinforcement learning. They share no page with the questions to tune and test on; those of the
second file share none with the first and train.jsonl either. The script of the warm start answers all of them.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from examples.warmstart.page_questions import page_questions
from examples.warmstart.questions import QuestionDemonstrator, is_right, keys
from examples.warmstart.record import demonstrate
from memsearcher_jax.config import RunConfig
from memsearcher_jax.data.questions import of_kind
from memsearcher_jax.data.readers import read_problems, with_source
from memsearcher_jax.launch import cli, outputs
from memsearcher_jax.ranges import Count, CountOrZero
from memsearcher_jax.retrieval.corpus import read_corpus
from memsearcher_jax.rl.setup import prepare
from memsearcher_jax.types import Problem

RL_SHARE = 3  # one of this many generated questions is for reinforcement learning
FIELDS = ("id", "question", "golden_answers", "metadata")  # of a written row


@dataclass(frozen=True)
class SplitQuestions(cli.Command):
    """Split questions into files that share no question and no supporting page. --config and --retrieval.corpus are for
    questions about the pages of a corpus, which the script answers as that agent, with that search."""

    files: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="FILE")] = ()
    """Questions in FlashRAG's layout: DATASET/SPLIT.jsonl, with supporting pages in the metadata. --data.questions
    selects their kind."""
    out: cli.Directory = None
    """Directory to write; it must be new."""
    tune: CountOrZero = 30
    """Minimum questions to tune on."""
    test: CountOrZero = 200
    """Minimum questions to test on."""
    generated: Count = 600
    """Maximum questions to make, as many as possible about the rarer kinds of facts: otherwise every third one asks for
    a nationality, which is easily guessed."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse(SplitQuestions, argv)
        config = flags.run
        problems = [with_source(problem, file.parent.name) for file in flags.files for problem in read_problems(file)]
        problems = [problem for problem in problems if of_kind(problem, config.data.questions)]
        test, tune, train = split(problems, (flags.test, flags.tune), config.seed)
        files = {"train": train, "tune": tune, "test": test}
        with outputs.new_output_dir(flags.out, "questions") as out:
            if config.retrieval.corpus:
                files |= generate(config, flags.generated, train, [*tune, *test])
            for name, chosen in files.items():
                rows = ({field: getattr(problem, field) for field in FIELDS} for problem in chosen)
                lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{out}: {', '.join(f'{len(chosen)} questions in {name}.jsonl' for name, chosen in files.items())}")


def split(problems: Sequence[Problem], sizes: Sequence[int], seed: int) -> list[list[Problem]]:
    """Splits of at least these sizes, and the rest. Questions that share an entity or a text are in the same split.

    Raises ValueError if there are too few questions.
    """
    first: dict[str, int] = {}
    links = [(row, first.setdefault(key, row)) for row, problem in enumerate(problems) for key in keys(problem)]
    rows, others = np.array(links, int).reshape(-1, 2).T
    shape = (len(problems) + 1,) * 2  # scipy needs a node
    count, group_of = connected_components(coo_matrix((np.ones(len(rows)), (rows, others)), shape))
    groups: list[list[Problem]] = [[] for _ in range(count - 1)]
    for problem, group in zip(problems, group_of, strict=False):
        groups[group].append(problem)
    random.Random(seed).shuffle(groups)
    splits: list[list[Problem]] = []
    for size in sizes:
        splits.append([])
        while len(splits[-1]) < size:
            if not groups:
                raise ValueError(f"{len(problems)} questions are too few for splits of {', '.join(map(str, sizes))}")
            splits[-1] += groups.pop()
    return [*splits, [problem for group in groups for problem in group]]


def without_shared(problems: Iterable[Problem], others: Iterable[Problem]) -> list[Problem]:
    """The problems that share neither their text nor an entity with `others`."""
    known = {key for problem in others for key in keys(problem)}
    return [problem for problem in problems if not known & keys(problem)]


def generate(
    config: RunConfig, count: int, train: Sequence[Problem], held_out: Sequence[Problem]
) -> dict[str, list[Problem]]:
    """Questions about pages of the corpus that the script answers right, by the name of their file."""
    problems = without_shared(page_questions(read_corpus(Path(config.retrieval.corpus)), config.seed), held_out)
    with tempfile.TemporaryDirectory() as folder:
        run = prepare(config, Path(folder), training=False, questions=problems)
        demonstrated = demonstrate(run, problems, QuestionDemonstrator)
    problems = [one.trajectory.problem for one in demonstrated if is_right(one)][:count]  # all kinds of facts in turn
    fresh = without_shared(problems, train)
    while len(closed := without_shared(fresh, [one for one in problems if one not in fresh])) < len(fresh):
        fresh = closed
    for_rl, _ = split(fresh, (min(len(problems) // RL_SHARE, len(fresh)),), config.seed)
    chosen = {problem.id for problem in for_rl}
    return {"generated_sft": [one for one in problems if one.id not in chosen], "generated_rl": for_rl}


if __name__ == "__main__":
    cli.run(main)
