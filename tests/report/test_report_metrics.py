"""metrics.jsonl: strict JSON, exact values, safe resume; the same scalars in the TensorBoard files."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.report.files import decode_float, encode_float, encode_line, replacing
from memsearcher_jax.report.metrics import MetricsWriter, read_metrics


def write_steps(directory, steps, **options):
    with MetricsWriter(directory, **options) as writer:
        for step in steps:
            writer.write(step, {"reward": step / 10})


def test_what_was_written_is_read(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"reward": 0.1, "turns": np.float32(2.5)})
        writer.write(1, {"reward": np.array(0.2), "turns": 3})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 0, "reward": 0.1, "turns": 2.5},
        {"step": 1, "reward": 0.2, "turns": 3.0},
    ]


def test_numbers_that_json_cannot_hold_are_strict_json_and_come_back(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"a": math.nan, "b": math.inf, "c": -math.inf})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text) == {"step": 0, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    (metrics,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(metrics["a"]) and metrics["b"] == math.inf and metrics["c"] == -math.inf


@given(st.floats(allow_nan=False))
def test_every_float_survives(value):
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


def test_resume_keeps_the_kept_lines_as_they_were(tmp_path):
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


def test_a_new_run_never_touches_the_metrics_of_an_old_one(tmp_path):
    write_steps(tmp_path, range(3))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="earlier run"):
        MetricsWriter(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("step", "metrics", "message"),
    [
        (1, {"reward": 0.0}, "step 1 come after those of step 1"),
        (2, {"step": 0.0}, 'may not be called "step"'),
        (2, {"reward": np.zeros(2)}, "'reward' is not one number"),
    ],
)
def test_bad_metrics_are_refused_and_leave_no_line(tmp_path, step, metrics, message):
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
        ('{"kl": 1}', "no whole number under 'step'"),
        ('{"step": 1, "kl": "high"}', "'high' is not a number"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_metrics(path)


def test_missing_metrics_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no metrics at .*metrics\.jsonl"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_tensorboard_files_hold_the_same_scalars(tmp_path):
    write_steps(tmp_path, range(3))
    (events,) = (tmp_path / "tensorboard").iterdir()
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for payload in tfrecords(events.read_bytes()):
        event = Event.FromString(payload)
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    assert found == [(step, "reward", pytest.approx(step / 10)) for step in range(3)]


def tfrecords(data):
    """The payloads of an event file: each stands between a length with its checksum and a checksum of its own."""
    while data:
        length = int.from_bytes(data[:8], "little")
        yield data[12 : 12 + length]
        data = data[16 + length :]


def test_a_failed_replacement_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), replacing(path) as file:
        file.write(b"half of the ne")
        raise RuntimeError
    assert [one.name for one in tmp_path.iterdir()] == ["file"] and path.read_bytes() == b"old"
