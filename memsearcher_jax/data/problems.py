"""The problems of a run, read from files or generated, and the order in which training draws them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from memsearcher_jax.data.benchmarks import resolve
from memsearcher_jax.data.questions import QuestionKind, of_kind
from memsearcher_jax.data.synthetic.encyclopedia import EncyclopediaConfig, make_encyclopedia
from memsearcher_jax.data.synthetic.streams import SyntheticStreamConfig, make_streams
from memsearcher_jax.types import Problem


@dataclass(frozen=True)
class DataConfig:
    """Training and test problems. Without any file, problems are generated from a seed."""

    train: tuple[str, ...] = ()
    """Training data: names of benchmarks in data.root (the paper uses nq hotpotqa), or files in the format of FlashRAG
    (JSONL with id, question, golden_answers, plain or .gz) or Search-R1 (.parquet)."""
    test: tuple[str, ...] = ()
    """Test data in the same form. A benchmark's name means the split that results are reported on; name:split selects
    another one."""
    root: str = ""
    """Folder of the benchmarks in FlashRAG's layout: nq/train.jsonl and so on."""
    questions: QuestionKind = "all"
    """Questions of the files to use: all; choice: those answered by yes, no or an option in the question, which can be
    guessed; or span: the others."""
    malformed: Literal["error", "skip"] = "error"
    """What to do with a malformed row: raise an error, or skip and count it."""
    synthetic: Literal["encyclopedia", "streams"] = "encyclopedia"
    """What to generate without files: questions about the embedded encyclopedia, or streams of chunks for
    agent.workflow memalpha."""
    encyclopedia: EncyclopediaConfig = field(default_factory=EncyclopediaConfig)
    """Seed and size of the embedded encyclopedia."""
    streams: SyntheticStreamConfig = field(default_factory=SyntheticStreamConfig)
    """Seed, number and lengths of the generated streams."""

    @property
    def is_synthetic(self) -> bool:
        return not (self.train or self.test)


@dataclass(frozen=True)
class ProblemSplits:
    """The training and test problems of a run."""

    train: Sequence[Problem]
    test: Sequence[Problem]
    skipped: tuple[str, ...] = ()  # one message per skipped row, at most 1,000 per file
    skipped_count: int = 0


def load(config: DataConfig, directory: Path) -> ProblemSplits:
    """Read and check every row. Problems are stored as datasets under `directory`, which later calls reuse.

    Raises:
      FileNotFoundError, ValueError: a one-line message that names the file, and the row if there is one.
    """
    # Imported here because it takes most of a second and reading a config must be fast.
    from memsearcher_jax.data.tfds_builder import FILE_SPLIT, open_split, skip_report, write_file, write_splits

    if config.is_synthetic:
        if config.synthetic == "streams":
            splits = make_streams(config.streams)
        else:
            encyclopedia = make_encyclopedia(config.encyclopedia)
            splits = {"train": encyclopedia.train, "test": encyclopedia.test}
        dataset = write_splits(splits, directory)
        return ProblemSplits(open_split([dataset], "train"), open_split([dataset], "test"))
    # Every entry is resolved before the first file is read.
    files = [
        [resolve(entry, split, config.root) for entry in entries]
        for split, entries in (("train", config.train), ("test", config.test))
    ]
    skip = config.malformed == "skip"
    train, test = ([write_file(*file, directory, skip_malformed=skip) for file in split] for split in files)
    reports = [skip_report(dataset) for dataset in (*train, *test)]
    train_split, test_split = (
        [problem for problem in split if of_kind(problem, config.questions)] if config.questions != "all" else split
        for split in (open_split(train, FILE_SPLIT), open_split(test, FILE_SPLIT))
    )
    return ProblemSplits(
        train_split,
        test_split,
        tuple(message for report in reports for message in report["skipped"]),
        sum(report["skipped_count"] for report in reports),
    )


def check_streams(
    problems: Iterable[Problem], count_tokens: Callable[[str], int], chunk_tokens: int, question_tokens: int
) -> None:
    """Raise ValueError naming the first problem that is not a stream, or has a chunk or a question over its budget."""
    for problem in problems:
        if problem.stream is None:
            raise ValueError(
                f"problem {problem.id!r} is not a stream: agent.workflow memalpha reads streams, the other workflows "
                "read questions"
            )
        questions = [question.text for question in problem.stream.questions]
        for name, texts, limit, setting in (
            ("chunk", problem.stream.chunks, chunk_tokens, "memalpha.chunk_tokens"),
            ("question", questions, question_tokens, "agent.question_tokens"),
        ):
            longest = max(map(count_tokens, texts))
            if longest > limit:
                raise ValueError(
                    f'stream "{problem.id}" has a {name} of {longest} tokens and the budget is {limit}: raise '
                    f"{setting} (and what depends on it, such as sampling.context_tokens) or remove the stream"
                )


def check_questions(problems: Iterable[Problem], count_tokens: Callable[[str], int], limit: int) -> None:
    """Raise ValueError naming the first question of more than `limit` tokens and the number of such questions."""
    counts = ((problem.id, count_tokens(problem.question)) for problem in problems)
    too_long = [(id, tokens) for id, tokens in counts if tokens > limit]
    if too_long:
        id, tokens = too_long[0]
        others = f" ({len(too_long)} such questions)" if len(too_long) > 1 else ""
        raise ValueError(
            f'question "{id}" has {tokens} tokens and the budget is {limit}{others}: '
            "raise agent.question_tokens, or shorten or remove the question"
        )


@dataclass(frozen=True)
class ProblemLoader:
    """An endless sequence of problems: each epoch holds every problem once, in an order given by (seed, epoch).

    The loader has no state. The caller keeps the position, and a resumed run continues from the position it saved.
    """

    problems: Sequence[Problem]
    seed: int

    def __post_init__(self) -> None:
        if not self.problems:
            raise ValueError("there are no training problems: set data.train to a file of questions")

    def batch(self, position: int, count: int, *, host: int = 0, num_hosts: int = 1) -> list[Problem]:
        """This host's contiguous share of the problems [position, position + count) of the sequence.

        Positions count the problems of all hosts together, so a run can resume on a different number of hosts.
        """
        if not 0 <= host < num_hosts:
            raise ValueError(f"host {host} is not one of {num_hosts} hosts")
        start, stop = (position + count * index // num_hosts for index in (host, host + 1))
        size = len(self.problems)
        batch: list[Problem] = []
        while (next_position := start + len(batch)) < stop:
            epoch, offset = divmod(next_position, size)
            order = np.random.default_rng((self.seed, epoch)).permutation(size)
            batch += [self.problems[int(row)] for row in order[offset : offset + stop - next_position]]
        return batch
