"""Questions as a tensorflow-datasets builder in array_record files: random access on disk, and no TensorFlow."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import tensorflow_datasets as tfds

from memsearcher_jax.agent.types import Problem


class Questions(tfds.core.GeneratorBasedBuilder):
    """FlashRAG question rows: `id`, `question`, `golden_answers`, and `metadata` as JSON text, in the files' order."""

    VERSION = tfds.core.Version("1.0.0")
    # Nothing is downloaded. The base class would look for a file of checksums, by way of a package that
    # tensorflow-datasets 4.9.10 imports and does not require.
    url_infos: ClassVar[dict] = {}

    def __init__(self, *, splits: Mapping[str, Sequence[Problem]], data_dir: Path):
        self._problems = splits
        super().__init__(data_dir=data_dir, file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        features = {"id": text, "question": text, "golden_answers": tfds.features.Sequence(text), "metadata": text}
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
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


def store(splits: Mapping[str, Sequence[Problem]], directory: Path) -> dict[str, StoredProblems]:
    """Write `splits` under `directory`, unless these very rows are there already, and open them.

    A split without rows is left out. tensorflow-datasets writes beside the place and renames, so that a killed write
    leaves nothing that opens.
    """
    splits = {split: rows for split, rows in splits.items() if rows}
    builder = Questions(splits=splits, data_dir=directory / fingerprint(splits))
    with _quiet():
        builder.download_and_prepare()
    return {split: StoredProblems(builder.as_data_source(split=split)) for split in builder.info.splits}


def fingerprint(splits: Mapping[str, Sequence[Problem]]) -> str:
    """Hexadecimal name of the rows: a changed file is another dataset, and an old one is never mistaken for it."""
    digest = hashlib.sha256()
    for split, problems in splits.items():
        for problem in problems:
            digest.update(json.dumps([split, _row(problem)], sort_keys=True).encode() + b"\n")
    return digest.hexdigest()[:16]


def _row(problem: Problem) -> dict[str, Any]:
    return {
        "id": problem.id,
        "question": problem.question,
        "golden_answers": list(problem.golden_answers),
        "metadata": json.dumps(problem.metadata),
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's bars and its announcement of a download on stdout: the rows are in memory."""
    tfds.display_progress_bar(False)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tfds.display_progress_bar(True)
