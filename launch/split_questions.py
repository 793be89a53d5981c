"""Splits questions into train, tune and test files that share no question and no supporting page.

python launch/split_questions.py FILE ... --out DIR --tune 30 --test 200
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from memsearcher_jax.data.questions import QuestionKind, of_kind, split, without_shared
from memsearcher_jax.data.readers import read_problems, with_source
from memsearcher_jax.launch import cli, outputs
from memsearcher_jax.ranges import Count, CountOrZero, Seed
from memsearcher_jax.retrieval.corpus import read_corpus
from memsearcher_jax.sft.page_questions import page_questions
from memsearcher_jax.types import Problem

RL_SHARE = 3  # one of this many generated questions is for reinforcement learning
FIELDS = ("id", "question", "golden_answers", "metadata")  # of a written row


@dataclass(frozen=True)
class SplitQuestions:
    """Split questions into train.jsonl, tune.jsonl and test.jsonl, which share no question and no supporting page."""

    files: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="FILE")]
    """Questions in FlashRAG's layout: DATASET/SPLIT.jsonl, with supporting pages in the metadata."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Directory to write; it must be new."""
    questions: QuestionKind = "all"
    """Questions to use, see data.questions."""
    tune: CountOrZero = 30
    """Minimum questions to tune on."""
    test: CountOrZero = 200
    """Minimum questions to test on."""
    seed: Seed = 0
    """Seed of the assignment."""
    corpus: cli.File = None
    """Passages. With them, also write generated_sft.jsonl and generated_rl.jsonl: two-hop questions about these pages,
    for the warm start and for reinforcement learning. They share no page with the questions to tune and test on; those
    of the second file share none with the first and train.jsonl either. The script of the warm start answers all of
    them with the agent and the search of --config."""
    generated: Count = 600
    """Maximum questions to make, as many as possible about the rarer kinds of facts: otherwise every third one asks for
    a nationality, which is easily guessed."""
    config: Annotated[str, tyro.conf.arg(metavar="NAME")] = "smollm2"
    """Preset of the agent, its prompts and its search."""


def main(argv: Sequence[str]) -> None:
    with cli.one_line_errors():
        flags = cli.parse_flags(SplitQuestions, argv)
        problems = [with_source(problem, file.parent.name) for file in flags.files for problem in read_problems(file)]
        problems = [problem for problem in problems if of_kind(problem, flags.questions)]
        test, tune, train = split(problems, (flags.test, flags.tune), flags.seed)
        files = {"train": train, "tune": tune, "test": test}
        if flags.corpus:
            files |= _generated(flags, flags.corpus, train, [*tune, *test])
        with outputs.new_output_dir(flags.out, "questions") as out:
            for name, chosen in files.items():
                rows = ({field: getattr(problem, field) for field in FIELDS} for problem in chosen)
                lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{out}: {', '.join(f'{len(chosen)} questions in {name}.jsonl' for name, chosen in files.items())}")


def _generated(
    flags: SplitQuestions, corpus: Path, train: Sequence[Problem], held_out: Sequence[Problem]
) -> dict[str, list[Problem]]:
    """Questions about pages of the corpus, by the name of their file."""
    problems = without_shared(page_questions(read_corpus(corpus), flags.seed), held_out)
    problems = _reachable(problems, flags.config, corpus)[: flags.generated]  # all kinds of facts in turn
    fresh = without_shared(problems, train)
    while len(closed := without_shared(fresh, [one for one in problems if one not in fresh])) < len(fresh):
        fresh = closed
    for_rl, _ = split(fresh, (min(len(problems) // RL_SHARE, len(fresh)),), flags.seed)
    chosen = {problem.id for problem in for_rl}
    return {"generated_sft": [one for one in problems if one.id not in chosen], "generated_rl": for_rl}


def _reachable(problems: Sequence[Problem], preset: str, corpus: Path) -> list[Problem]:
    """The problems that the script of the warm start answers right."""
    from memsearcher_jax.rl import setup
    from memsearcher_jax.sft.question_tasks import is_right, make_demonstrations

    config = cli.load_preset(preset)
    config = replace(config, retrieval=replace(config.retrieval, corpus=str(corpus)))
    with tempfile.TemporaryDirectory() as workspace:
        run = setup.prepare(config, Path(workspace), training=False, questions=problems)
        return [one.trajectory.problem for one in make_demonstrations(run, problems) if is_right(one)]


if __name__ == "__main__":
    cli.run(main)
