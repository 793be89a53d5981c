"""Supervised learning with the folder, the checkpoints and the metrics of a training run."""

import os
import shutil
import signal

import numpy as np
import pytest

from examples.warmstart import demonstrate
from memsearcher_jax.hosts.ending import STOPPED
from memsearcher_jax.launch import export_hf, sft, tpu_train
from memsearcher_jax.logs.metrics import read_metrics
from memsearcher_jax.logs.progress import Progress
from memsearcher_jax.logs.run_facts import has_ended
from memsearcher_jax.logs.trajectories import compress_trajectories, read_trajectories, step_path

SETTINGS = {
    "config": "tiny_warmstart",
    "model.layers": 1,
    "model.embed_size": 32,
    "model.ffn_size": 64,
    "model.head_size": 8,
    "rl.checkpoint_every": 1,
    "sft.measure_every": 2,
    "sft.epochs": 2,
    "training.warmup_steps": 0,
    "training.minibatch_rows": 8,
    "training.grad_accum_steps": 1,
}


def small(**changes):
    """The flags of a small run; `sft__epochs=1` changes sft.epochs."""
    settings = SETTINGS | {name.replace("__", "."): value for name, value in changes.items()}
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """A third of two steps of demonstrations and of held-out ones."""
    out = tmp_path_factory.mktemp("demos") / "demos"
    demonstrate.main(["--config", "tiny_warmstart", "--steps", "2", "--out", str(out)])
    for file in out.rglob("*.jsonl.gz"):
        file.write_bytes(compress_trajectories(list(read_trajectories(file))[::3]))
    return ["--sft.trajectories", str(out), "--sft.held_out", str(out / "held_out")]


@pytest.fixture(scope="module")
def finished(demos, tmp_path_factory):
    out = tmp_path_factory.mktemp("sft") / "run"
    sft.main([*small(), *demos, "--out", str(out)])
    return out


def numbers(run):
    """The metrics of a run without its times."""
    return [
        {name: value for name, value in step.items() if not name.startswith(("time/", "host_"))}
        for step in metrics(run)
    ]


def metrics(run):
    return read_metrics(run / "metrics.jsonl")


def test_the_loss_falls_and_held_out_decisions_are_measured_by_their_kind(finished):
    steps = metrics(finished)
    assert len(steps) == 4 and steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert ["held_out/query/probability" in step for step in steps] == [False, True, False, True]
    for kind in ("query", "fact", "answer", "react/query", "react/answer"):
        assert 0 <= steps[-1][f"held_out/{kind}/probability"] <= 1
        assert 0 < steps[-1][f"held_out/{kind}/loss"] < 10
    assert 0.5 < np.mean([step["reward"] for step in steps]) < 1, "demonstrations contain errors, and tasks do not"
    assert (finished / "report.html").is_file()
    assert has_ended(finished)


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_saves_a_checkpoint_and_is_resumed(finished, demos, tmp_path, capsys):
    class StopAfterTheFirstStep(Progress):
        def advance(self, metrics):
            super().advance(metrics)
            os.kill(os.getpid(), signal.SIGTERM)

    out = tmp_path / "run"
    with pytest.raises(SystemExit) as stop:
        sft.main([*small(rl__checkpoint_every=9), *demos, "--out", str(out)], StopAfterTheFirstStep)
    assert stop.value.code == STOPPED
    assert "stopped after step 2 (" in capsys.readouterr().err
    sft.main(["--resume", "--out", str(out)])
    assert numbers(out) == numbers(finished)


@pytest.mark.slow
def test_a_resumed_run_goes_on_for_more_epochs_on_the_same_files_only(finished, demos, tmp_path, refused, capsys):
    out = tmp_path / "run"
    sft.main([*small(sft__epochs=1), *demos, "--out", str(out)])
    flags = ["--resume", "--out", str(out), "--sft.epochs", "2"]
    for steps in ("1", "9"):  # done, or not
        assert "was trained by launch/sft.py: resume" in refused(tpu_train.main, [*flags[:3], "--rl.steps", steps])
    assert "are other files than when" in refused(sft.main, [*flags, "--sft.trajectories", str(step_path(demos[1], 0))])
    shorter_rows = ["--training.seq_len", "288", "--sampling.context_tokens", "288"]  # a context is longer
    for change in (["--sft.min_reward", "0.9"], ["--seed", "3"], shorter_rows):
        message = refused(sft.main, [*flags, *change])
        assert "would train some trajectories twice and others never" in message
        assert f"{change[0].strip('-')} from" in message
    sft.main(flags)
    assert numbers(out) == numbers(finished)
    assert "sft.epochs changed: 1 -> 2" in capsys.readouterr().err


@pytest.mark.slow
def test_adapters_learn_from_demonstrations_and_are_exported(finished, demos, tmp_path, refused):
    out, adapter, merged = tmp_path / "run", tmp_path / "adapter", tmp_path / "merged"
    base = shutil.copytree(finished, tmp_path / "base")
    words = [*small(), *demos, "--model.path", str(base), "--model.lora_rank", "4", "--out", str(out)]
    sft.main([*words, "--training.learning_rate", "1e-2"])
    assert metrics(out)[-1]["loss"] < metrics(out)[0]["loss"] - 0.1
    export_hf.main(["--checkpoint", str(out), "--out", str(adapter), "--adapter"])
    export_hf.main(["--checkpoint", str(out), "--out", str(merged)])
    assert (adapter / "adapter_model.safetensors").stat().st_size < (merged / "model.safetensors").stat().st_size / 3
    assert "trained by sft" in (merged / "README.md").read_text()
    shutil.rmtree(base / "checkpoints")
    sft.main([*small(), *demos, "--seed", "1", "--out", str(tmp_path / "other")])
    shutil.copytree(tmp_path / "other" / "checkpoints", base / "checkpoints")
    assert "model.path has changed since" in refused(sft.main, ["--resume", "--out", str(out), "--sft.epochs", "3"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--config tiny", "--sft.trajectories is missing: give trajectory files"),
        ("--config qwen05b --sft.trajectories {demos}", "--model.path is missing"),
        ("--config tiny_memalpha --sft.trajectories none", "none: no such file"),
        (
            "--config tiny --teacher.path t --sft.trajectories none",
            "teacher.path t has no effect in supervised learning",
        ),
        (
            "--config tiny --teacher.path t --training.objective distill --sft.trajectories none",
            "has no effect in supervised learning, which imitates sft.trajectories alone: omit it",
        ),
        (
            "--config nano --sft.trajectories {demos} --sft.min_reward 2",
            "leave nothing to train on",
        ),
        (
            "--config nano --sft.trajectories {demos} --sft.held_out {demos}",
            "is in sft.trajectories and in sft.held_out",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_training(flags, message, demos, tmp_path, refused):
    out = tmp_path / "out"
    assert message in refused(sft.main, [*flags.format(demos=demos[1]).split(), "--out", out])
    assert not out.exists()
