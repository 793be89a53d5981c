"""Problems as a tensorflow-datasets builder over array_record files: random access on disk, without TensorFlow."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import tensorflow_datasets as tfds

from memsearcher_jax.data.benchmarks import BENCHMARKS, resolve
from memsearcher_jax.data.readers import read_problems, with_source
from memsearcher_jax.types import Problem, Stream

DAMAGED = "a file of this dataset is damaged ({}); delete the folder"
RUN = "run"  # the builder config of the problems of a run's files


class FlashRag(tfds.core.GeneratorBasedBuilder):
    """Rows of `id`, `question`, `golden_answers`, and `metadata` and `stream` as JSON text, in the order of the source.

    The builder config names the source: a benchmark, or a run. Importing this module registers the benchmarks, which
    are read from `manual_dir`: tfds.data_source("flash_rag/nq", split="test").
    """

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS: ClassVar[list] = [tfds.core.BuilderConfig(name=name) for name in (*BENCHMARKS, RUN)]
    MANUAL_DOWNLOAD_INSTRUCTIONS = "Put the folders of RUC-NLPIR/FlashRAG_datasets (nq/test.jsonl and so on) there."
    url_infos = None  # the base class would read it with a package that tensorflow-datasets does not require

    def __init__(
        self, *, splits: Mapping[str, Sequence[Problem]] | None = None, file_format: Any = None, **kwargs: Any
    ):
        """`splits` are only needed to write the dataset of a run."""
        self._problems = splits or {}
        super().__init__(file_format=file_format or "array_record", **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        names = ("id", "question", "metadata", "stream")
        features: dict[str, tfds.features.FeatureConnector] = {name: tfds.features.Text() for name in names}
        features["golden_answers"] = tfds.features.Sequence(tfds.features.Text())
        features_dict = tfds.features.FeaturesDict(features)
        return tfds.core.DatasetInfo(builder=self, features=features_dict, disable_shuffling=True)

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        config: Any = self.builder_config  # annotated as optional
        name = config.name
        splits = self._problems
        if not splits and name in BENCHMARKS:
            splits = _read_benchmark(name, str(dl_manager.manual_dir))
        return {split: self._generate_examples(problems) for split, problems in splits.items()}

    def _generate_examples(self, problems: Sequence[Problem]) -> Iterator[tuple[int, dict[str, Any]]]:
        return enumerate(map(_encode, problems))


def _read_benchmark(name: str, root: str) -> dict[str, Sequence[Problem]]:
    """The splits that have answers. All files are resolved before the first is read."""
    files = {split: resolve(f"{name}:{split}", split, root)[0] for split in BENCHMARKS[name].splits}
    return {split: [with_source(problem, name) for problem in read_problems(file)] for split, file in files.items()}


@dataclass(frozen=True)
class StoredProblems(Sequence[Problem]):
    """The problems of one split of a written dataset, read from disk when accessed."""

    rows: Sequence[Mapping[str, Any]]
    folder: str | Path  # for error messages

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        number = range(len(self))[index]  # resolves negative indices and raises IndexError
        if isinstance(number, range):
            return tuple(map(self.__getitem__, number))
        with _explained(self.folder, DAMAGED):
            return _decode(self.rows[number])


@contextlib.contextmanager
def _explained(folder: str | Path, text: str) -> Iterator[None]:
    """Turns an error about the files of a dataset, of half a dozen types, into ValueError: the text with the reason."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{folder}: {text.format(reason)}") from error


def store(splits: Mapping[str, Sequence[Problem]], directory: Path) -> dict[str, StoredProblems]:
    """The splits on disk: written as a dataset under `directory` unless it exists. Empty ones are left out.

    tensorflow-datasets writes to a temporary folder and renames it, so an interrupted write leaves no dataset.
    """
    splits = {split: problems for split, problems in splits.items() if problems}
    folder = directory / fingerprint(splits)
    with _explained(folder, DAMAGED):
        dataset = FlashRag(config=RUN, data_dir=folder, splits=splits)
    tfds.display_progress_bar(False)
    with _explained(folder, "this dataset cannot be written ({})"), contextlib.redirect_stdout(io.StringIO()):
        dataset.download_and_prepare()
    with _explained(folder, DAMAGED):
        # The library's decorators hide the parameters from type checkers.
        rows = {split: dataset.as_data_source(split=split) for split in splits}  # pyright: ignore[reportCallIssue]
        list(map(len, rows.values()))  # opens the files
    return {split: StoredProblems(of_split, folder) for split, of_split in rows.items()}


def fingerprint(splits: Mapping[str, Sequence[Problem]]) -> str:
    """Hexadecimal digest of all rows, so that a dataset of other rows is never read in their place."""
    digest = hashlib.sha256()
    for split, problems in splits.items():
        for problem in problems:
            digest.update(json.dumps([split, _encode(problem)], sort_keys=True).encode() + b"\n")
    return digest.hexdigest()[:16]


def _encode(problem: Problem) -> dict[str, Any]:
    return {
        "id": problem.id,
        "question": problem.question,
        "golden_answers": list(problem.golden_answers),
        "metadata": json.dumps(problem.metadata),
        "stream": json.dumps(asdict(problem.stream)) if problem.stream else "",
    }


def _decode(row: Mapping[str, Any]) -> Problem:
    return Problem(
        id=row["id"].decode(),
        question=row["question"].decode(),
        golden_answers=tuple(answer.decode() for answer in row["golden_answers"]),
        metadata=json.loads(row["metadata"]),
        stream=Stream.from_dict(json.loads(row["stream"])) if row["stream"] else None,
    )
