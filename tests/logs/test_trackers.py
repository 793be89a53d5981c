"""Trackers get what metrics.jsonl gets; Weights & Biases is tested offline."""

import json
import struct
import time

import pytest

from memsearcher_jax.logs import trackers
from memsearcher_jax.logs.metrics import MetricsWriter


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """Offline, and without the settings and caches of the user."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    yield
    wandb.teardown()  # it reads the environment once in a process


def log_records(data):
    """The records of a file in LevelDB's log format, in blocks of 32 KiB after a header of seven bytes."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := 32_768 - at % 32_768) < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


def records(run):
    """What the offline runs in a directory hold, in order: (settings, metrics of each step).

    The service of Weights & Biases may write the last record of a run after the run is finished.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    settings, steps = {}, []
    for file in sorted(run.glob("wandb/offline-run-*/run-*.wandb")):
        until = time.monotonic() + 20
        while True:
            written = [Record.FromString(data) for data in log_records(file.read_bytes())]
            if written and written[-1].WhichOneof("record_type") == "exit":
                break
            assert time.monotonic() < until, f"{file} is incomplete"
            time.sleep(0.05)
        for record in written:
            settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.history.item:
                items = record.history.item
                steps.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    return settings, steps


def test_weights_and_biases_gets_settings_and_metrics_also_of_a_resumed_run(tmp_path, wandb):
    for resume_step in (None, 1):
        if resume_step:
            time.sleep(1.1)  # names of the directories contain seconds
        run = {"trackers": ("wandb",), "settings": {"rl": {"steps": 2}}}
        with MetricsWriter(tmp_path, **run, resume_step=resume_step) as writer:
            writer.write(resume_step or 0, {"reward": 0.5})
    settings, steps = records(tmp_path)
    assert settings["rl"] == {"steps": 2}
    assert [(values["step"], values["reward"]) for values in steps] == [(0, 0.5), (1, 0.5)]
    assert len({file.stem for file in tmp_path.glob("wandb/offline-run-*/run-*.wandb")}) == 1, "they have the same id"
    assert not (tmp_path / "tensorboard").exists()


def test_a_missing_library_is_one_line(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    trackers.check_installed(("tensorboard",))
    with pytest.raises(ValueError, match=r"rl.trackers wandb: wandb is not installed: pip install"):
        trackers.check_installed(("tensorboard", "wandb"))


def test_a_run_without_access_is_refused_in_one_line(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "short")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"rl.trackers wandb: .*WANDB_MODE=offline") as error:
        MetricsWriter(tmp_path, trackers=("wandb",))
    assert "\n" not in str(error.value)
