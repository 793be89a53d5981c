"""metrics.jsonl: strict JSON, exact values, safe resume; the same scalars in the TensorBoard files."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.jsonl import decode_float, encode_float, encode_line, parse_object
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.metrics import MetricsWriter, read_metrics


def write_steps(directory, steps, **options):
    with MetricsWriter(directory, **options) as writer:
        for step in steps:
            writer.write(step, {"reward": step / 10})


def test_round_trip(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"reward": 0.1, "turns": np.float32(2.5)})
        writer.write(1, {"reward": np.array(0.2), "turns": 3})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 0, "reward": 0.1, "turns": 2.5},
        {"step": 1, "reward": 0.2, "turns": 3.0},
    ]


def test_non_finite_numbers_are_strict_json_and_round_trip(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"a": math.nan, "b": math.inf, "c": -math.inf})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text) == {"step": 0, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    (metrics,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(metrics["a"]) and metrics["b"] == math.inf and metrics["c"] == -math.inf


@given(st.floats(allow_nan=False))
def test_every_finite_float_round_trips(value):
    line = encode_line({"x": encode_float(value)})
    assert decode_float(json.loads(line, parse_constant=pytest.fail)["x"]) == value


def test_a_line_is_on_disk_as_soon_as_its_step_ends(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(0, {"reward": 1.0})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "reward": 1.0}]
    writer.close()


def test_resume_drops_the_steps_that_will_run_again(tmp_path):
    write_steps(tmp_path, range(6))
    write_steps(tmp_path, range(4, 8), resume_step=4)
    assert [metrics["step"] for metrics in read_metrics(tmp_path / "metrics.jsonl")] == list(range(8))


def test_resume_preserves_earlier_lines_exactly(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"reward": math.nan, "kl": 0.1 + 0.2})
        writer.write(1, {"reward": 1.0})
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    MetricsWriter(tmp_path, resume_step=1).close()
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == before[:1]


def test_resume_after_a_kill_in_the_middle_of_a_line(tmp_path):
    write_steps(tmp_path, range(3))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "rew')
    assert len(read_metrics(path)) == 3
    write_steps(tmp_path, [3], resume_step=3)
    assert [metrics["step"] for metrics in read_metrics(path)] == [0, 1, 2, 3]


def test_a_new_run_does_not_overwrite_existing_metrics(tmp_path):
    write_steps(tmp_path, range(3))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="earlier run"):
        MetricsWriter(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("step", "metrics", "message"),
    [
        (1, {"reward": 0.0}, "step 1 follow those of step 1"),
        (2, {"step": 0.0}, 'a metric is called "step"'),
        (2, {"reward": np.zeros(2)}, "'reward' is not a scalar"),
    ],
)
def test_invalid_metrics_raise_and_write_nothing(tmp_path, step, metrics, message):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"reward": 0.5})
        with pytest.raises(ValueError, match=message):
            writer.write(step, metrics)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "reward": 0.5}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", r"metrics\.jsonl:2: not JSON"),
        ("[1]", r"metrics\.jsonl:2: a JSON object is needed"),
        ('{"kl": 1}', ".step. is not an integer"),
        ('{"step": 1, "kl": "high"}', "'high' is not a number"),
    ],
)
def test_a_malformed_line_raises_with_its_number(tmp_path, line, message):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_metrics(path)


def test_a_line_that_is_cut_off_is_reported_at_its_end():
    with pytest.raises(ValueError, match=r"f:1: not JSON \(.*, column 8\)"):
        parse_object("f:1", b'{"a": 1\n')


def test_a_missing_file_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no metrics at .*metrics\.jsonl"):
        read_metrics(tmp_path / "metrics.jsonl")


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
    def full_disk(_):
        raise OSError

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError):
        atomic_write(path, b"half of the new")
    assert [one.name for one in tmp_path.iterdir()] == ["file"] and path.read_bytes() == b"old"
