"""A command that has started a run resumes it: `run.json` holds the settings as they were given."""

import contextlib
import json

import pytest

from memsearcher_jax.launch import cli, job_output, tpu_train
from memsearcher_jax.logs.metrics import read_metrics
from memsearcher_jax.runs.run_dir import read_run_config, write_run_config
from memsearcher_jax.training.trainer import Trainer
from tests.support import with_flags

VARIANTS = {
    "as it is": "",
    "cache of int8": "--sampling.kv int8",
    "weights of int8": "--sampling.weights int8",
    "int8 with a cap": "--sampling.kv int8 --training.old_logprobs trainer --training.tis_cap 3",
    "epochs": "--rl.epochs 2",
    "fractions of a run": "--training.warmup_steps 5% --training.decay_steps 90%",
    "relative paths": "--data.train=q.jsonl --data.test q.jsonl --retrieval.corpus c.jsonl --agent.prompts templates",
    "weights in a folder": "--model.path weights/base --data.root files/all",
    "a home directory": "--data.train=~/q.jsonl --data.test=~/q.jsonl --retrieval.corpus=~/c.jsonl",
    "a run as weights": "--checkpoint runs/base",
}


def start_or_resume(words) -> tpu_train.Train:
    """The flags of the command, with --resume where it resumes a run."""
    with contextlib.ExitStack() as scratch:
        source, rest = cli.parse_source(tpu_train.Train, words)
        source, _ = job_output.localize(source, scratch)
        return cli.parse_settings(tpu_train.Train, source, rest)


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """The working and home directory, with the files of VARIANTS."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("q.jsonl", "c.jsonl", "templates/system.txt", "weights/base/config.json", "files/all/nq.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "runs" / "base").mkdir(parents=True)
    write_run_config(tmp_path / "runs" / "base", cli.load_preset("nano"))
    return tmp_path


def check_resumes(words, workdir):
    first = start_or_resume(words)
    assert not first.resume
    (workdir / "run").mkdir()
    write_run_config(workdir / "run", first.run)
    second = start_or_resume(words)
    assert second.resume
    assert second.run == first.run
    return second.run


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_command_resumes(variant, workdir):
    words = ["--config", "qwen3b", "--smoke_test", "--start_or_resume", "--out", "run", *VARIANTS[variant].split()]
    check_resumes(words, workdir)


# Of each agent that has settings of its own, of a warm start and of a published model.
FAST_PRESETS = ("nano", "tiny", "tiny_memalpha", "qwen7b", "smollm2_warmstart")


@pytest.mark.parametrize(
    "preset",
    [preset if preset in FAST_PRESETS else pytest.param(preset, marks=pytest.mark.variant) for preset in cli.presets()],
)
def test_every_preset_resumes_with_a_sampler_of_int8(preset, workdir):
    words = ["--config", preset, "--smoke_test", "--start_or_resume", "--out=run", "--sampling.kv", "int8"]
    stored = check_resumes(words, workdir)
    assert stored.training == cli.load_preset(preset).training


@pytest.mark.parametrize("variant", ["relative paths", "weights in a folder", "a home directory"])
def test_the_same_command_resumes_after_its_files_are_gone(variant, workdir):
    words = ["--config", "nano", "--start_or_resume", "--out", "run", *VARIANTS[variant].split()]
    started = start_or_resume(words).run
    (workdir / "run").mkdir()
    write_run_config(workdir / "run", started)
    for name in ("q.jsonl", "c.jsonl", "templates/system.txt", "weights/base/config.json", "files/all/nq.jsonl"):
        (workdir / name).unlink()
    (workdir / "templates").rmdir()
    (workdir / "weights" / "base").rmdir()
    (workdir / "files" / "all").rmdir()
    assert start_or_resume(words).run == started


def test_other_settings_are_still_refused(workdir):
    words = ["--config", "nano", "--start_or_resume", "--out", "run", "--data.train", "q.jsonl"]
    (workdir / "run").mkdir()
    write_run_config(workdir / "run", start_or_resume([*words, "--retrieval.corpus", "c.jsonl"]).run)
    with pytest.raises(ValueError, match=r"^retrieval.corpus is '/.*/c.jsonl' in run, but --config .* give ''"):
        start_or_resume(words)


@pytest.mark.slow
def test_a_run_of_int8_stops_and_goes_on_by_the_same_command(small, tmp_path, capsys, monkeypatch):
    trained_with = []
    make_step = Trainer.step

    def step(trainer, *arguments):
        trained_with.append((trainer.config.old_logprobs, trainer.config.tis_cap))
        return make_step(trainer, *arguments)

    monkeypatch.setattr(Trainer, "step", step)
    out = tmp_path / "run"
    words = [*with_flags(small, "--rl.steps", "1"), "--sampling.kv", "int8", "--start_or_resume", "--out", str(out)]
    tpu_train.main(words)
    stored = json.loads((out / "run.json").read_text())["training"]
    assert (stored["old_logprobs"], stored["tis_cap"]) == ("auto", 0.0)
    tpu_train.main(words)
    assert "step 1 of 1 is already done" in capsys.readouterr().out
    tpu_train.main(["--resume", "--out", str(out), "--sampling.kv", "compute_dtype", "--rl.steps", "2"])
    assert trained_with == [("trainer", 2.0), ("auto", 0.0)]
    assert read_run_config(out).training.old_logprobs == "auto"
    assert [step["step"] for step in read_metrics(out / "metrics.jsonl")] == [0, 1]
