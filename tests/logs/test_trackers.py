"""Trackers get what metrics.jsonl gets; Weights & Biases is tested offline."""

import pytest

from memsearcher_jax.logs import trackers
from memsearcher_jax.logs.metrics import MetricsWriter, read_metrics


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """Offline, and without the settings and caches of the user."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    yield wandb
    wandb.teardown()  # it reads the environment once in a process


@pytest.mark.variant
def test_weights_and_biases_gets_settings_and_metrics_also_of_a_resumed_run(tmp_path, wandb, monkeypatch):
    log, logged, runs = wandb.Run.log, [], set()

    def spy(run, values, **options):
        logged.append(values | options)
        runs.add(run.id)
        assert run.config["rl"] == {"steps": 2}
        return log(run, values, **options)

    monkeypatch.setattr(wandb.Run, "log", spy)
    for resume_step in (None, 1):
        run = {"trackers": ("wandb",), "settings": {"rl": {"steps": 2}}}
        with MetricsWriter(tmp_path, **run, resume_step=resume_step) as writer:
            writer.write(resume_step or 0, {"reward": 0.5})
    assert [values["reward"] for values in logged] == [0.5, 0.5] and len(runs) == 1, "they have the same id"
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
    with pytest.raises(ValueError, match=r"^rl.trackers wandb: .*WANDB_MODE=offline\Z"):
        MetricsWriter(tmp_path, trackers=("wandb",))


def test_a_tracker_that_fails_ends_neither_the_run_nor_its_metrics(tmp_path, monkeypatch, capsys):
    """Its process may be gone, or the thread that writes its files, after a full disk."""

    def fail(*_):
        raise ConnectionResetError(104, "Connection reset by peer")

    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"reward": 0.0})
        monkeypatch.setattr(trackers.TensorBoard, "log", fail)
        for step in (1, 2):
            writer.write(step, {"reward": 0.5})
            assert len(read_metrics(tmp_path / "metrics.jsonl")) == step + 1
    reason = "ConnectionResetError: [Errno 104] Connection reset by peer"
    assert capsys.readouterr().err == f"TensorBoard gets no metrics until the run is resumed ({reason})\n"
