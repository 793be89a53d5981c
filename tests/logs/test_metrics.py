"""metrics.jsonl: strict JSON, exact values, safe resume; the same scalars in the TensorBoard files."""

import errno
import json
import math

import numpy as np
import pytest

from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.metrics import MetricsWriter, read_metrics


def full_disk(_):
    raise OSError(errno.ENOSPC, "No space left on device")


def write_steps(directory, steps, **options):
    with MetricsWriter(directory, **options) as writer:
        for step in steps:
            writer.write(step, {"reward": step / 10})


def test_lines_are_strict_json_that_reads_back_exactly_and_is_on_disk_as_soon_as_its_step_ends(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"kl": 0.1 + 0.2, "turns": np.float32(2.5), "entropy": np.array(0.2)})
        assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "kl": 0.1 + 0.2, "turns": 2.5, "entropy": 0.2}]
        writer.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
        for step, metrics in ((1, {"reward": 0.0}), (2, {"step": 0.0})):
            with pytest.raises(ValueError, match="after step 1: steps ascend"):
                writer.write(step, metrics)
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[1]
    assert json.loads(last) == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    metrics = read_metrics(tmp_path / "metrics.jsonl")[1]
    assert math.isnan(metrics["a"]) and metrics["b"] == math.inf and metrics["c"] == -math.inf


def test_resume_drops_the_steps_that_will_run_again(tmp_path):
    write_steps(tmp_path, range(6))
    path = tmp_path / "metrics.jsonl"
    before = path.read_text().splitlines()
    with pytest.raises(ValueError, match="earlier run"):
        MetricsWriter(tmp_path)
    write_steps(tmp_path, range(4, 8), resume_step=4)
    assert [metrics["step"] for metrics in read_metrics(path)] == list(range(8))
    assert path.read_text().splitlines()[:4] == before[:4]


def test_what_could_not_be_written_is_written_with_the_next_step(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(tmp_path, trackers=()) as writer:
        writer.write(0, {"reward": 0.0})
        with monkeypatch.context() as full, pytest.raises(OSError):
            full.setattr("os.fsync", full_disk)
            writer.write(1, {"reward": 0.1})
        assert [metrics["step"] for metrics in read_metrics(path)] == [0]
        writer.write(2, {"reward": 0.2})
        assert [metrics["step"] for metrics in read_metrics(path)] == [0, 1, 2]
        with monkeypatch.context() as full, pytest.raises(OSError):
            full.setattr("os.fsync", full_disk)
            writer.write(3, {"reward": 0.3})
    assert len(read_metrics(path)) == 4, "the last chance is the end"


def test_what_an_earlier_run_lacked_is_added_to_its_last_step(tmp_path):
    write_steps(tmp_path, range(3))
    with MetricsWriter(tmp_path, resume_step=2) as writer:
        writer.complete(1, {"reward": 9.0, "test/reward": 0.5})
        writer.write(2, {"reward": 0.2})
        writer.complete(3, {"test/reward": 0.6})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 0, "reward": 0.0},
        {"step": 1, "reward": 0.1, "test/reward": 0.5},
        {"step": 2, "reward": 0.2},
        {"step": 3, "test/reward": 0.6},
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"a": 1', r"metrics\.jsonl:2: not JSON \(.*, column 8\)"),
        ("[1]", r"metrics\.jsonl:2: a JSON object is needed"),
        ('{"kl": 1}', r"metrics\.jsonl:2: no metrics of a step \('step'\)"),
        ('{"step": 1, "kl": "high"}', "'high' is not a number"),
        ('{"step": 1, "kl": 1' + "0" * 400 + "}", r"metrics\.jsonl:2: no metrics of a step \(int too large"),
    ],
)
def test_a_malformed_line_raises_with_its_number(tmp_path, line, message):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_metrics(path)


def test_tensorboard_files_contain_the_same_scalars(tmp_path):
    write_steps(tmp_path, range(3))
    (events,) = (tmp_path / "tensorboard").iterdir()
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for payload in tfrecords(events.read_bytes()):
        event = Event.FromString(payload)
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    assert found == [(step, "reward", pytest.approx(step / 10)) for step in range(3)]


def tfrecords(data):
    """The payloads of an event file: each follows its length with a checksum, and is followed by its own checksum."""
    while data:
        length = int.from_bytes(data[:8], "little")
        yield data[12 : 12 + length]
        data = data[16 + length :]


def test_a_failed_atomic_write_keeps_the_old_file_and_removes_the_temporary_one(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match=rf"No space left on device: .{path}"):
        atomic_write(path, b"half of the new")
    assert [one.name for one in tmp_path.iterdir()] == ["file"] and path.read_bytes() == b"old"
    monkeypatch.setattr("os.fsync", lambda _: (monkeypatch.undo(), atomic_write(path, b"of another process")))
    atomic_write(path, b"new")
    assert [one.name for one in tmp_path.iterdir()] == ["file"] and path.read_bytes() == b"new"
