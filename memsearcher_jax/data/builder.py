"""Questions as a tensorflow-datasets builder in array_record files: random access on disk, and no TensorFlow."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import tensorflow_datasets as tfds

from memsearcher_jax.agent.types import Problem
from memsearcher_jax.data.questions import of_source, read_questions
from memsearcher_jax.data.sources import SPLITS, Source

FILE, WORLD = "file", "world"  # what is no benchmark
ROWS = "questions"  # the one split of a dataset that was made from one file
MOST_REPORTED = 1_000  # malformed rows that are kept by name; the others are counted


class Questions(tfds.core.GeneratorBasedBuilder):
    """FlashRAG question rows: `id`, `question`, `golden_answers`, and `metadata` as JSON text, in the files' order.

    The config names where they are from: a benchmark, a file, the embedded world. `info.metadata` tells what was left
    out: `skipped`, the lines, and `skipped_count`.
    """

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS: ClassVar[list] = [tfds.core.BuilderConfig(name=name) for name in (*SPLITS, FILE, WORLD)]
    # Nothing is downloaded. The base class would look for a file of checksums, by way of a package that
    # tensorflow-datasets 4.9.10 imports and does not require.
    url_infos: ClassVar[dict] = {}

    def __init__(
        self,
        *,
        config: str,
        data_dir: Path,
        splits: Mapping[str, Sequence[Problem]] | None = None,
        skipped: Sequence[str] = (),
    ):
        """`splits` and `skipped` are needed to prepare the data, not to read what is prepared."""
        self._problems = splits or {}
        self._skipped = skipped
        super().__init__(config=config, data_dir=data_dir, file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        features = {"id": text, "question": text, "golden_answers": tfds.features.Sequence(text), "metadata": text}
        skipped = {"skipped": list(self._skipped[:MOST_REPORTED]), "skipped_count": len(self._skipped)}
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(features),
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict(skipped),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        return {split: self._generate_examples(problems) for split, problems in self._problems.items()}

    def _generate_examples(self, problems: Sequence[Problem]) -> Iterator[tuple[int, dict[str, Any]]]:
        return enumerate(_row(problem) for problem in problems)


@dataclass(frozen=True)
class StoredProblems(Sequence[Problem]):
    """Problems that stay on disk until they are asked for."""

    source: Sequence[Mapping[str, Any]]

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, row: int | slice) -> Problem | tuple[Problem, ...]:
        if isinstance(row, slice):
            return tuple(self[i] for i in range(len(self))[row])
        fields = self.source[range(len(self))[row]]  # the range knows negative rows, and where to raise IndexError
        return Problem(
            id=fields["id"].decode(),
            question=fields["question"].decode(),
            golden_answers=tuple(answer.decode() for answer in fields["golden_answers"]),
            metadata=json.loads(fields["metadata"]),
        )


@dataclass(frozen=True)
class Mixture(Sequence[Problem]):
    """Several sets as one, each after the other; a stream that shuffles them draws from each by its size."""

    parts: tuple[Sequence[Problem], ...]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self.parts else 0

    def __getitem__(self, row: int | slice) -> Problem | tuple[Problem, ...]:
        if isinstance(row, slice):
            return tuple(self[i] for i in range(len(self))[row])
        row = range(len(self))[row]
        part = bisect_right(self._ends, row)
        return self.parts[part][row - self._ends[part] + len(self.parts[part])]


@dataclass(frozen=True)
class StoredFile:
    """The usable rows of one file, and what was left out."""

    problems: StoredProblems
    skipped: tuple[str, ...]  # lines that name file, line and reason
    skipped_count: int


def store_file(source: Source, directory: Path, *, skip: bool) -> StoredFile:
    """The questions of a file, from a dataset under `directory`; written if this very file has none there yet.

    With `skip`, malformed rows are left out; without it the first is an error. Raises as `read_questions` does.
    """
    if not source.path.is_file():
        read_questions(source.path)  # which says what is wrong with it
    # The path counts only where lines that name it are kept: a file that was moved is not read again.
    key = f"{source.name}\n{source.path if skip else ''}\n{_digest(source.path)}"
    place = {"config": source.name or FILE, "data_dir": directory / hashlib.sha256(key.encode()).hexdigest()[:16]}
    builder = Questions(**place)
    if not builder.is_prepared():
        skipped: list[str] = []
        problems = read_questions(source.path, skipped.append if skip else None)
        if source.name:
            problems = [of_source(source.name, problem) for problem in problems]
        builder = Questions(**place, splits={ROWS: problems}, skipped=skipped)
        _prepare(builder)
    told = builder.info.metadata
    problems = StoredProblems(builder.as_data_source(split=ROWS))
    return StoredFile(problems, tuple(told["skipped"]), told["skipped_count"])


def store(splits: Mapping[str, Sequence[Problem]], directory: Path) -> dict[str, StoredProblems]:
    """Write `splits` under `directory`, unless these very rows are there already, and open them.

    A split without rows is left out. tensorflow-datasets writes beside the place and renames, so that a killed write
    leaves nothing that opens.
    """
    splits = {split: rows for split, rows in splits.items() if rows}
    builder = Questions(config=WORLD, data_dir=directory / fingerprint(splits), splits=splits)
    _prepare(builder)
    return {split: StoredProblems(builder.as_data_source(split=split)) for split in builder.info.splits}


def fingerprint(splits: Mapping[str, Sequence[Problem]]) -> str:
    """Hexadecimal name of the rows: a changed world is another dataset, and an old one is never mistaken for it."""
    digest = hashlib.sha256()
    for split, problems in splits.items():
        for problem in problems:
            digest.update(json.dumps([split, _row(problem)], sort_keys=True).encode() + b"\n")
    return digest.hexdigest()[:16]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _row(problem: Problem) -> dict[str, Any]:
    return {
        "id": problem.id,
        "question": problem.question,
        "golden_answers": list(problem.golden_answers),
        "metadata": json.dumps(problem.metadata),
    }


def _prepare(builder: Questions) -> None:
    """Without the library's bars and its announcement of a download on stdout: the rows are in memory."""
    tfds.display_progress_bar(False)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare()
    finally:
        tfds.display_progress_bar(True)
