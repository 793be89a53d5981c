import json
import random
import re
import resource
import shutil
from dataclasses import replace

import pytest
import tensorflow_datasets as tfds

from memsearcher_jax.data.config import DataConfig
from memsearcher_jax.data.problems import load
from memsearcher_jax.data.tfds_builder import FlashRag, store
from memsearcher_jax.types import Problem

ROWS = [Problem(f"q{row}", f"Qué {row}?", ("a", "b")[: 1 + row % 2], {"hops": row}) for row in range(25)]


def record_times(directory):
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*.array_record*")}


def test_stored_problems_are_a_sequence_in_the_order_of_the_rows(tmp_path):
    stored = store({"train": ROWS, "test": ROWS[:3], "dev": []}, tmp_path)
    assert set(stored) == {"train", "test"} and list(stored["test"]) == ROWS[:3]
    rows = stored["train"]
    assert list(rows) == ROWS and len(rows) == 25
    assert rows[-1] == rows[24] == ROWS[-1] and rows[20:40] == tuple(ROWS[20:])
    with pytest.raises(IndexError):
        rows[25]


def test_same_rows_are_written_once(tmp_path):
    store({"train": ROWS}, tmp_path)
    before = record_times(tmp_path)
    assert len(before) == 1
    assert list(store({"train": list(ROWS)}, tmp_path)["train"]) == ROWS
    assert record_times(tmp_path) == before
    store({"test": ROWS}, tmp_path)
    assert list(store({"train": ROWS[1:]}, tmp_path)["train"]) == ROWS[1:]
    assert len(record_times(tmp_path)) == 3, "the split is part of the fingerprint"


def test_a_damaged_file_of_a_dataset_says_what_to_delete(tmp_path):
    source, config = tmp_path / "q.jsonl", DataConfig(train=(str(tmp_path / "q.jsonl"),))
    source.write_text(json.dumps({"id": "a", "question": "Who?", "golden_answers": ["Ada"]}) + "\n")
    load(config, tmp_path / "whole")
    files = [path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file()]
    for number, file in enumerate(files):
        copy = shutil.copytree(tmp_path / "whole", tmp_path / str(number))
        (copy / file).write_bytes((copy / file).read_bytes()[:-9])
        try:
            assert list(load(config, copy).train) == list(load(config, tmp_path / "whole").train)
        except ValueError as error:
            folder = re.match(
                rf"({copy}/.+?): a file of this dataset is damaged \(.*\); delete the folder$", str(error)
            )
            assert folder, error
            shutil.rmtree(folder[1])
            assert len(load(config, copy).train) == 1
        else:
            assert file.name in ("features.json", "metadata.json"), file


def test_a_disk_that_is_full_is_an_error_in_one_line(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limits[1]))
    try:
        with pytest.raises(ValueError, match=rf"^{tmp_path}/\w+: this dataset cannot be written \(.*File too large"):
            store({"train": [replace(ROWS[0], question=random.Random(0).randbytes(4_000).hex())]}, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def write_questions(file, count):
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"id": f"{row}", "question": f"{file.parent.name} {row}?", "golden_answers": ["x"]} for row in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_benchmarks_are_registered(tmp_path):
    """tfds.load is the same for those who have TensorFlow."""
    write_questions(tmp_path / "root" / "nq" / "test.jsonl", 4)
    for split in ("train", "dev"):
        write_questions(tmp_path / "root" / "nq" / f"{split}.jsonl", 2)
    assert tfds.builder_cls("flash_rag") is FlashRag
    download = tfds.download.DownloadConfig(manual_dir=str(tmp_path / "root"))
    source = tfds.data_source(
        "flash_rag/nq", split="test", data_dir=tmp_path, download_and_prepare_kwargs={"download_config": download}
    )
    assert [row["id"].decode() for row in source] == [f"nq/{row}" for row in range(4)]
