"""The problems of a run, read from files or generated, and the order in which training draws them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from memsearcher_jax.data.benchmarks import SPLITS, resolve
from memsearcher_jax.data.questions import QuestionKind, of_kind
from memsearcher_jax.data.readers import CHUNK_WORDS
from memsearcher_jax.data.synthetic.documents import DocumentConfig, make_documents
from memsearcher_jax.data.synthetic.encyclopedia import EncyclopediaConfig, make_encyclopedia
from memsearcher_jax.data.synthetic.streams import SyntheticStreamConfig, make_streams
from memsearcher_jax.jsonl import id_field, numbered_lines, parse_object
from memsearcher_jax.ranges import Count
from memsearcher_jax.types import Problem


@dataclass(frozen=True)
class DataConfig:
    """Training and test problems. Without any file, problems are generated from a seed."""

    train: tuple[str, ...] = ()
    """Training data: names of benchmarks in data.root (the paper uses nq hotpotqa), or files in the format of FlashRAG
    (JSONL with id, question, golden_answers, plain or .gz) or Search-R1 (.parquet); for agent.workflow memalpha streams
    in Mem-alpha's format."""
    mixture: str = ""
    """Training data with weights, in place of data.train: nq=0.5,hotpotqa=0.5. An epoch has as many problems as the
    sources together, and each source has its share of them by weight: a small source repeats, a large one goes on in
    the next epoch."""
    test: tuple[str, ...] = ()
    """Test data in the same form. A benchmark's name means the split that results are reported on; name:split selects
    another one."""
    root: str = ""
    """Folder, or dataset repository of the Hub, of the benchmarks in FlashRAG's layout: nq/train.jsonl and so on."""
    questions: QuestionKind = "all"
    """Questions of the files to use: all; choice: those answered by yes, no or an option in the question, which can be
    guessed; or span: the others."""
    objectives: Count = 1
    """Questions that one problem joins, as in MEM1; semicolons separate them, and their answers. A rest is left out."""
    exclude: str = ""
    """JSONL file of {"id"} of training problems to leave out, such as hopeless.jsonl of launch/build_index.py
    --audit."""
    chunk_words: Count = CHUNK_WORDS
    """Words of a chunk of a conversation of LongMemEval or LoCoMo (.json), at most: its sessions are divided."""
    malformed: Literal["error", "skip"] = "error"
    """What to do with a malformed row: raise an error, or skip and count it."""
    synthetic: Literal["encyclopedia", "streams", "documents"] = "encyclopedia"
    """What to generate without files: questions about the embedded encyclopedia, streams of chunks for agent.workflow
    memalpha, or long documents with a question each for memagent."""
    encyclopedia: EncyclopediaConfig = field(default_factory=EncyclopediaConfig)
    """Seed and size of the embedded encyclopedia."""
    documents: DocumentConfig = field(default_factory=DocumentConfig)
    """Lengths of the generated documents."""
    streams: SyntheticStreamConfig = field(default_factory=SyntheticStreamConfig)
    """Seed, number and lengths of the generated streams."""

    @property
    def is_synthetic(self) -> bool:
        return not (self.train_entries or self.test)

    @property
    def train_entries(self) -> tuple[str, ...]:
        return tuple(self.weights()) or self.train

    def weights(self) -> dict[str, float]:
        """Source -> weight of `mixture`. Raises ValueError in one line if it is malformed."""
        weights: dict[str, float] = {}
        for part in filter(None, self.mixture.split(",")):
            name, _, text = part.rpartition("=")
            try:
                weight = float(text)
            except ValueError:
                weight = 0.0
            if not name or name in weights or not 0 < weight < math.inf:
                raise ValueError(f"data.mixture has {part!r}: write each source once, as nq=0.5,hotpotqa=0.5")
            weights[name] = weight
        if weights and self.objectives > 1:
            raise ValueError("data.objectives joins questions of data.train: leave data.mixture empty")
        if weights and self.train:
            raise ValueError("data.mixture and data.train both name training data: leave one of them empty")
        return weights


@dataclass(frozen=True)
class ProblemSplits:
    train: Sequence[Problem]
    test: Sequence[Problem]
    mixture: tuple[tuple[int, float], ...] = ()  # (problems, weight) of each source of `train`, in its order
    skipped: tuple[str, ...] = ()  # one message per skipped row, at most 1,000 per file
    skipped_count: int = 0


def load(config: DataConfig, directory: Path) -> ProblemSplits:
    """Read and check every row. Problems are stored as datasets under `directory`, which later calls reuse.

    Raises:
      FileNotFoundError, ValueError: a one-line message that names the file, and the row if there is one.
    """
    # Imported here because it takes most of a second and reading a config must be fast.
    from memsearcher_jax.data.tfds_builder import FILE_SPLIT, open_split, skip_report, write_file, write_splits

    excluded = _read_ids(Path(config.exclude)) if config.exclude else frozenset()

    def kept(problems: Sequence[Problem], excluded: Collection[str] = ()) -> Sequence[Problem]:
        if config.questions == "all" and not excluded:
            return problems  # on disk
        return [one for one in problems if one.id not in excluded and of_kind(one, config.questions)]

    def joined(problems: Sequence[Problem]) -> Sequence[Problem]:
        return problems if config.objectives == 1 else JoinedProblems(problems, config.objectives)

    def check_excluded(problems: Sequence[Problem]) -> None:
        if excluded and not any(one.id in excluded for one in problems):
            raise ValueError(f"data.exclude {config.exclude}: none of its {len(excluded)} ids is a training problem")

    if config.is_synthetic:
        if config.synthetic == "streams":
            splits = make_streams(config.streams)
        elif config.synthetic == "documents":
            splits = make_documents(config.encyclopedia, config.documents)
        else:
            encyclopedia = make_encyclopedia(config.encyclopedia)
            splits = {"train": encyclopedia.train, "test": encyclopedia.test}
        dataset = write_splits(splits, directory)
        problems = open_split([dataset], "train")
        check_excluded(problems)
        problems = kept(problems, excluded) if excluded else problems
        return ProblemSplits(joined(problems), joined(open_split([dataset], "test")))
    # Every entry is resolved before the first file is read.
    files = [
        [resolve(entry, split, config.root) for entry in entries]
        for split, entries in (("train", config.train_entries), ("test", config.test))
    ]
    weights = config.weights()
    for name, (path, _) in zip(weights, files[0], strict=False):
        if not path.is_file():
            raise FileNotFoundError(f"data.mixture {name}: neither a benchmark ({', '.join(SPLITS)}) nor a file")
    options = {"skip_malformed": config.malformed == "skip", "chunk_words": config.chunk_words}
    train, test = ([write_file(*file, directory, **options) for file in split] for split in files)
    reports = [skip_report(dataset) for dataset in (*train, *test)]

    sizes = [len(kept(open_split([dataset], FILE_SPLIT), excluded)) for dataset in train] if weights else []
    if empty := [name for name, size in zip(weights, sizes, strict=True) if not size]:
        raise ValueError(f"data.mixture {empty[0]}: no question is one of data.questions {config.questions}")
    check_excluded(open_split(train, FILE_SPLIT))
    return ProblemSplits(
        joined(kept(open_split(train, FILE_SPLIT), excluded)),
        joined(kept(open_split(test, FILE_SPLIT))),
        tuple(zip(sizes, weights.values(), strict=True)),
        tuple(message for report in reports for message in report["skipped"]),
        sum(report["skipped_count"] for report in reports),
    )


@dataclass(frozen=True)
class JoinedProblems(Sequence[Problem]):
    """Each problem joins `count` of the questions, which are at equal distances among all."""

    problems: Sequence[Problem]
    count: int

    def __post_init__(self) -> None:
        if self.problems and self.problems[0].stream:
            raise ValueError("data.objectives joins questions, and these problems are streams: set it to 1")

    def __len__(self) -> int:
        return len(self.problems) // self.count

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < len(self):
            raise IndexError(index)
        parts = [self.problems[index + number * len(self)] for number in range(self.count)]
        metadata = {"objectives": [list(one.golden_answers) for one in parts]}
        if source := parts[0].metadata.get("source"):
            metadata["source"] = source
        return Problem(
            "; ".join(one.id for one in parts),
            "; ".join(one.question for one in parts),
            ("; ".join(one.golden_answers[0] for one in parts),),
            metadata,
        )


def _read_ids(path: Path) -> frozenset[str]:
    return frozenset(id_field(where, parse_object(where, line)) for where, line in numbered_lines(path))


@dataclass(frozen=True)
class ProblemLoader:
    """An endless sequence of problems: each epoch holds every problem once, in an order given by (seed, epoch).

    With a mixture an epoch holds each source by its weight, and each source repeats when all of it was drawn.

    The loader has no state. The caller keeps the position, and a resumed run continues from the position it saved.
    """

    problems: Sequence[Problem]
    seed: int
    mixture: Sequence[tuple[int, float]] = ()  # of `ProblemSplits`

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
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.problems))
        if not self.mixture:
            return order
        sizes, weights = zip(*self.mixture, strict=True)
        ends = np.cumsum((0, *weights)) / sum(weights) * len(self.problems)
        rows, first = [], 0
        for source, (size, count) in enumerate(zip(sizes, np.diff(np.round(ends).astype(int)), strict=True)):
            # A source is drawn in cycles of its own, which an epoch may cut.
            cycles, places = np.divmod(epoch * count + np.arange(count), size)
            for cycle in np.unique(cycles):
                cycle_order = np.random.default_rng((self.seed, source + 1, int(cycle) + 1)).permutation(size)
                rows.append(first + cycle_order[places[cycles == cycle]])
            first += size
        return np.concatenate(rows)[order]
