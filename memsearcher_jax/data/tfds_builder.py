"""Problems as a tensorflow-datasets builder over array_record files: random access on disk, without TensorFlow."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import tensorflow_datasets as tfds

from memsearcher_jax.data.benchmarks import SPLITS, resolve
from memsearcher_jax.data.readers import CHUNK_WORDS, read_problems, with_source
from memsearcher_jax.types import Problem, Stream

FILE, SYNTHETIC = "file", "synthetic"  # builder configs other than the benchmarks
FILE_SPLIT = "problems"  # the only split of a dataset built from one file


class FlashRag(tfds.core.GeneratorBasedBuilder):
    """Rows of `id`, `question`, `golden_answers`, and `metadata` and `stream` as JSON text, in the order of the source.

    The builder config names the source: a benchmark, a file, or synthetic data. Importing this module registers the
    benchmarks, read from `manual_dir`: tfds.data_source("flash_rag/nq", split="test").
    """

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS: ClassVar[list] = [tfds.core.BuilderConfig(name=name) for name in (*SPLITS, FILE, SYNTHETIC)]
    MANUAL_DOWNLOAD_INSTRUCTIONS = "Put the folders of RUC-NLPIR/FlashRAG_datasets (nq/test.jsonl and so on) there."
    url_infos = None  # the base class would read it with a package that tensorflow-datasets does not require

    def __init__(
        self, *, splits: Mapping[str, Sequence[Problem]] | None = None, file_format: Any = None, **kwargs: Any
    ):
        """`splits` are only needed to write a dataset of a file or of synthetic data."""
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
        name, splits = config.name, self._problems
        if not splits and name in SPLITS:
            files = {split: resolve(f"{name}:{split}", split, str(dl_manager.manual_dir))[0] for split in SPLITS[name]}
            splits = {split: [with_source(one, name) for one in read_problems(file)] for split, file in files.items()}
        return {split: self._generate_examples(problems) for split, problems in splits.items()}

    def _generate_examples(self, problems: Sequence[Problem]) -> Iterator[tuple[int, dict[str, Any]]]:
        return enumerate(map(_encode, problems))

    def write(self) -> None:
        """Write the dataset unless it exists, without the progress bars and messages that downloads print."""
        tfds.display_progress_bar(False)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                self.download_and_prepare()
        finally:
            tfds.display_progress_bar(True)


@dataclass(frozen=True)
class StoredProblems(Sequence[Problem]):
    """The concatenated problems of several datasets, read from disk when accessed."""

    sources: tuple[Sequence[Mapping[str, Any]], ...]
    folders: tuple[str, ...]  # of each source, for error messages

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(map(len, self.sources)))

    def __len__(self) -> int:
        return self._ends[-1] if self.sources else 0

    def __getitem__(self, index: Any) -> Any:
        rows = range(len(self))[index]  # resolves negative indices and raises IndexError
        if isinstance(rows, range):
            return tuple(map(self.__getitem__, rows))
        number = bisect_right(self._ends, rows)
        source = self.sources[number]
        with _explain_damage(self.folders[number]):
            return _decode(source[rows - self._ends[number] + len(source)])


def open_split(datasets: Sequence[FlashRag], split: str) -> StoredProblems:
    """One split of several written datasets. Datasets without it contribute nothing."""
    available = [dataset for dataset in datasets if split in dataset.info.splits]
    sources = []
    for dataset in available:
        with _explain_damage(dataset.data_dir):
            # The library's decorators hide the parameters from type checkers.
            sources.append(dataset.as_data_source(split=split))  # pyright: ignore[reportCallIssue]
            len(sources[-1])
    return StoredProblems(tuple(sources), tuple(str(dataset.data_dir) for dataset in available))


@contextlib.contextmanager
def _explain_damage(folder: str | Path) -> Iterator[None]:
    """Turns an error about a damaged file of a dataset, of half a dozen types, into ValueError with the way out."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{folder}: a file of this dataset is damaged ({reason}); delete the folder") from error


def write_file(
    path: Path,
    benchmark: str,
    directory: Path,
    on_malformed: Callable[[str], object] | None = None,
    chunk_words: int = CHUNK_WORDS,
) -> FlashRag:
    """Convert a file of a benchmark, or of none (""), to a dataset under `directory`, unless one exists for it.

    With `on_malformed` the file is read in any case. Raises as `read_problems` does.
    """
    if not path.is_file():
        read_problems(path)  # raises the error that explains what is wrong
    with path.open("rb") as content:
        checksum = hashlib.file_digest(content, "sha256").hexdigest()
    key = f"{benchmark}\n{on_malformed is not None}\n{checksum}"
    key += f"\n{chunk_words}" if path.suffix == ".json" else ""
    location = {"config": benchmark or FILE, "data_dir": directory / hashlib.sha256(key.encode()).hexdigest()[:16]}
    with _explain_damage(location["data_dir"]):
        dataset = FlashRag(**location)
        if dataset.is_prepared() and not on_malformed:
            return dataset
    problems = read_problems(path, on_malformed, chunk_words)
    if benchmark:
        problems = [with_source(problem, benchmark) for problem in problems]
    dataset = FlashRag(**location, splits={FILE_SPLIT: problems})
    dataset.write()
    return dataset


def write_splits(splits: Mapping[str, Sequence[Problem]], directory: Path) -> FlashRag:
    """Write synthetic problems as a dataset under `directory`, unless it exists. Empty splits are left out.

    tensorflow-datasets writes to a temporary folder and renames it, so an interrupted write leaves no dataset.
    """
    splits = {split: problems for split, problems in splits.items() if problems}
    folder = directory / fingerprint(splits)
    with _explain_damage(folder):
        dataset = FlashRag(config=SYNTHETIC, data_dir=folder, splits=splits)
    dataset.write()
    return dataset


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
