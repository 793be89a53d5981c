"""The problems of a run, read from files or generated, and the order in which training draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from memsearcher_jax.data.benchmarks import resolve
from memsearcher_jax.data.config import DataConfig
from memsearcher_jax.data.questions import of_kind
from memsearcher_jax.data.readers import read_problems, with_source
from memsearcher_jax.data.synthetic.documents import make_documents
from memsearcher_jax.data.synthetic.encyclopedia import make_encyclopedia
from memsearcher_jax.data.synthetic.streams import make_streams
from memsearcher_jax.jsonl import id_field, numbered_lines, parse_object
from memsearcher_jax.types import Problem


@dataclass(frozen=True)
class ProblemFile:
    """One file of problems that the settings name."""

    split: str  # "train" or "test"
    path: Path
    benchmark: str  # "" for a file that is named by its path
    name: str = ""  # the source of its problems that name none; "" if it is the only file of its split


@dataclass(frozen=True)
class ProblemSplits:
    train: Sequence[Problem]
    test: Sequence[Problem]
    skipped: tuple[str, ...] = ()  # one message per malformed row
    left_out: tuple[str, ...] = ()  # one message for each setting that leaves problems out


def load(config: DataConfig, directory: Path) -> ProblemSplits:
    """Read and check every row. The rows of files are stored as a dataset under `directory`, which later calls reuse.

    Raises FileNotFoundError or ValueError, in one line that names the file, and the row if there is one.
    """
    skipped = list[str]()
    splits = make_problems(config) if config.is_synthetic else _stored(config, directory, skipped)
    train = splits.get("train", ())
    test = splits.get("test", ())
    excluded_ids = _read_ids(Path(config.exclude)) if config.exclude else frozenset[str]()
    if excluded_ids:
        _check_excluded(config.exclude, excluded_ids, train)
    left_out = list[str]()
    selected_train = _selected(config, "train", train, left_out, excluded_ids)
    selected_test = _selected(config, "test", test, left_out)
    return ProblemSplits(selected_train, selected_test, tuple(skipped), tuple(left_out))


def _check_excluded(file: str, excluded_ids: frozenset[str], train: Sequence[Problem]) -> None:
    """Raises ValueError unless the ids are those of training problems, and each is the id of one question."""
    questions_by_id: dict[str, set[str]] = {}
    for problem in train:
        if problem.id in excluded_ids:
            questions_by_id.setdefault(problem.id, set()).add(problem.question)
    if not questions_by_id:
        raise ValueError(f"data.exclude {file}: none of its {len(excluded_ids)} ids is a training problem")
    if any(len(questions) > 1 for questions in questions_by_id.values()):  # FlashRAG's benchmarks have the same ids
        raise ValueError(f"data.exclude {file}: an id is of two questions: name benchmarks, with data.root")


def _stored(config: DataConfig, directory: Path, skipped: list[str]) -> Mapping[str, Sequence[Problem]]:
    """The problems of all files by split. With data.malformed skip, `skipped` gets a message for each bad row."""
    on_malformed = skipped.append if config.malformed == "skip" else None
    problems: dict[str, list[Problem]] = {"train": [], "test": []}
    for file in _problem_files(config):
        of_file = read_problems(file.path, on_malformed, config.chunk_words)
        if file.benchmark:
            of_file = [with_source(problem, file.benchmark) for problem in of_file]
        elif file.name:
            of_file = [_named(problem, file.name) for problem in of_file]
        problems[file.split] += of_file
    from memsearcher_jax.data.tfds_builder import store  # takes seconds to import

    return store(problems, directory)


def _problem_files(config: DataConfig) -> list[ProblemFile]:
    """The files of all entries. All are resolved before the first is read, which may take minutes."""
    files = []
    for split, entries in (("train", config.train), ("test", config.test)):
        of_split = list[ProblemFile]()
        for entry in entries:
            path, benchmark = resolve(entry, split, config.root)
            of_split.append(ProblemFile(split, path, benchmark))
        if len(of_split) > 1:
            names = _file_names([file.path for file in of_split])
            of_split = [replace(file, name=name) for file, name in zip(of_split, names, strict=True)]
        files += of_split
    return files


def _file_names(paths: Sequence[Path]) -> list[str]:
    """What tells the files apart: their names without suffix, or these with the folder in front."""
    stems = [path.name.removesuffix(".gz").rpartition(".")[0] or path.name for path in paths]
    if len(set(stems)) == len(stems):
        return stems
    return [f"{path.absolute().parent.name}/{stem}" for path, stem in zip(paths, stems, strict=True)]


def _named(problem: Problem, name: str) -> Problem:
    """The problem with this source, unless it names one: evaluations have a row for each source."""
    return problem if "source" in problem.metadata else replace(problem, metadata={**problem.metadata, "source": name})


def make_problems(config: DataConfig) -> dict[str, tuple[Problem, ...]]:
    """The generated problems of the splits train and test."""
    if config.synthetic == "streams":
        return make_streams(config.streams)
    if config.synthetic == "documents":
        return make_documents(config.encyclopedia, config.documents)
    encyclopedia = make_encyclopedia(config.encyclopedia)
    return {"train": encyclopedia.train, "test": encyclopedia.test}


def _selected(
    config: DataConfig,
    split: str,
    problems: Sequence[Problem],
    left_out: list[str],
    excluded_ids: frozenset[str] = frozenset(),
) -> Sequence[Problem]:
    """The problems of data.questions that are not excluded, joined as data.objectives says.

    `left_out` gets a message for each of these settings that leaves problems out.
    """
    selected = problems
    if excluded_ids:  # else they stay on disk
        selected = [problem for problem in selected if problem.id not in excluded_ids]
        left_out.append(
            f"data.exclude leaves out {len(problems) - len(selected):,} of {len(problems):,} {split} problems"
        )
    if config.questions != "all":
        given = len(selected)
        selected = of_kind(selected, config.questions)
        if given > len(selected):
            count = f"{given - len(selected):,} of {given:,} {split} questions"
            left_out.append(f"data.questions {config.questions} leaves out {count}, which can be guessed")
    if config.objectives > 1:
        rest = len(selected) % config.objectives
        selected = _joined(selected, config.objectives)
        if rest:
            left_out.append(f"data.objectives {config.objectives} leaves out a rest of {rest} {split} questions")
    if problems and not selected:
        raise ValueError(f"data.exclude, data.questions or data.objectives leaves none of {len(problems)} problems")
    return selected


def _joined(problems: Sequence[Problem], count: int) -> list[Problem]:
    """Each problem joins `count` of the questions, which are at equal distances among all.

    Of seven problems, three joins of two are 0 with 3, 1 with 4, and 2 with 5; the seventh is left out.
    """
    if any(problem.stream for problem in problems):
        raise ValueError("data.objectives joins questions, and these problems are streams: set it to 1")
    total = len(problems) // count
    return [_join([problems[first + number * total] for number in range(count)]) for first in range(total)]


def _join(parts: Sequence[Problem]) -> Problem:
    """The problem that asks all the questions, and takes all their answers, between semicolons."""
    metadata: dict[str, Any] = {"objectives": [list(part.golden_answers) for part in parts]}
    if source := parts[0].metadata.get("source"):
        metadata["source"] = source
    return Problem(
        id="; ".join(part.id for part in parts),
        question="; ".join(part.question for part in parts),
        golden_answers=("; ".join(part.golden_answers[0] for part in parts),),
        metadata=metadata,
    )


def _read_ids(path: Path) -> frozenset[str]:
    return frozenset(id_field(where, parse_object(where, line)) for where, line in numbered_lines(path))


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

    def batch(self, position: int, count: int) -> list[Problem]:
        """The problems [position, position + count) of the sequence."""
        batch: list[Problem] = []
        while len(batch) < count:
            epoch, offset = divmod(position + len(batch), len(self.problems))
            batch += [self.problems[int(row)] for row in self._epoch(epoch)[offset : offset + count - len(batch)]]
        return batch

    def _epoch(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.problems))
