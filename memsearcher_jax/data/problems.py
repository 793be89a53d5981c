"""The problems of a run, read from files or generated, and the order in which training draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
class ProblemSplits:
    train: Sequence[Problem]
    test: Sequence[Problem]
    skipped: tuple[str, ...] = ()  # one message per malformed row


def load(config: DataConfig, directory: Path) -> ProblemSplits:
    """Read and check every row. The rows of files are stored as a dataset under `directory`, which later calls reuse.

    Raises FileNotFoundError or ValueError, in one line that names the file, and the row if there is one.
    """
    skipped = list[str]()
    splits = make_problems(config) if config.is_synthetic else _stored(config, directory, skipped)
    train, test = (splits.get(split, ()) for split in ("train", "test"))
    excluded = _read_ids(Path(config.exclude)) if config.exclude else frozenset[str]()
    named = {(one.id, one.question) for one in train if one.id in excluded} if excluded else set()
    if excluded and not named:
        raise ValueError(f"data.exclude {config.exclude}: none of its {len(excluded)} ids is a training problem")
    if len({id for id, _ in named}) < len(named):  # FlashRAG's benchmarks have the same ids
        raise ValueError(f"data.exclude {config.exclude}: an id is of two questions: name benchmarks, with data.root")
    return ProblemSplits(_selected(config, train, excluded), _selected(config, test), tuple(skipped))


def _stored(config: DataConfig, directory: Path, skipped: list[str]) -> Mapping[str, Sequence[Problem]]:
    """The problems of all files by split. With data.malformed skip, `skipped` gets a message for each bad row."""
    on_malformed = skipped.append if config.malformed == "skip" else None
    problems: dict[str, list[Problem]] = {"train": [], "test": []}
    # Every entry is resolved before the first file is read.
    files = [(split, *resolve(one, split, config.root)) for split in problems for one in getattr(config, split)]
    for split, path, benchmark in files:
        read = read_problems(path, on_malformed, config.chunk_words)
        problems[split] += [with_source(one, benchmark) if benchmark else one for one in read]
    from memsearcher_jax.data.tfds_builder import store  # takes seconds to import

    return store(problems, directory)


def make_problems(config: DataConfig) -> dict[str, tuple[Problem, ...]]:
    """The generated problems of the splits train and test."""
    if config.synthetic == "streams":
        return make_streams(config.streams)
    if config.synthetic == "documents":
        return make_documents(config.encyclopedia, config.documents)
    encyclopedia = make_encyclopedia(config.encyclopedia)
    return {"train": encyclopedia.train, "test": encyclopedia.test}


def _selected(
    config: DataConfig, problems: Sequence[Problem], excluded: frozenset[str] = frozenset()
) -> Sequence[Problem]:
    """The problems of data.questions that are not excluded, joined as data.objectives says."""
    given = len(problems)
    if excluded or config.questions != "all":  # else they stay on disk
        problems = [one for one in of_kind(problems, config.questions) if one.id not in excluded]
    selected = problems if config.objectives == 1 else _joined(problems, config.objectives)
    if given and not selected:
        raise ValueError(f"data.exclude, data.questions or data.objectives leaves none of {given} problems")
    return selected


def _joined(problems: Sequence[Problem], count: int) -> list[Problem]:
    """Each problem joins `count` of the questions, which are at equal distances among all."""
    if any(one.stream for one in problems):
        raise ValueError("data.objectives joins questions, and these problems are streams: set it to 1")
    total, joined = len(problems) // count, []
    for first in range(total):
        parts = [problems[first + number * total] for number in range(count)]
        metadata: dict[str, Any] = {"objectives": [list(one.golden_answers) for one in parts]}
        if source := parts[0].metadata.get("source"):
            metadata["source"] = source
        id, question = ("; ".join(texts) for texts in zip(*((one.id, one.question) for one in parts), strict=True))
        joined.append(Problem(id, question, ("; ".join(one.golden_answers[0] for one in parts),), metadata))
    return joined


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
