import json
import re
import shutil

import pytest
import tensorflow_datasets as tfds

from memsearcher_jax.data.problems import DataConfig, load
from memsearcher_jax.data.tfds_builder import FlashRag, open_split, write_splits
from memsearcher_jax.types import Problem

ROWS = [Problem(f"q{row}", f"Qué {row}?", ("a", "b")[: 1 + row % 2], {"hops": row}) for row in range(25)]


def record_times(directory):
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*.array_record*")}


def test_stored_problems_are_a_sequence_in_the_order_of_the_rows(tmp_path):
    dataset = write_splits({"train": ROWS, "test": ROWS[:3], "dev": []}, tmp_path)
    assert set(dataset.info.splits) == {"train", "test"}
    assert list(open_split([dataset], "test")) == ROWS[:3]
    assert list(open_split([dataset], "dev")) == []
    stored = open_split([dataset, dataset], "train")
    assert list(stored) == [*ROWS, *ROWS]
    assert len(stored) == 50
    assert stored[-1] == stored[24] == ROWS[-1] and stored[25] == ROWS[0]
    assert stored[20:27] == (*ROWS[20:], *ROWS[:2]) and stored[45:60] == tuple(ROWS[20:])
    assert ROWS[7] in stored
    with pytest.raises(IndexError):
        stored[50]


def test_same_rows_are_written_once(tmp_path):
    write_splits({"train": ROWS}, tmp_path)
    before = record_times(tmp_path)
    assert len(before) == 1
    assert list(open_split([write_splits({"train": list(ROWS)}, tmp_path)], "train")) == ROWS
    assert record_times(tmp_path) == before
    write_splits({"test": ROWS}, tmp_path)
    assert len(record_times(tmp_path)) == 2, "the split is part of the fingerprint"


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
    assert list(open_split([FlashRag(config="nq", data_dir=tmp_path)], "test"))[1].question == "nq 1?"
