"""Runs that learn from a teacher: another run's model."""

import shutil
from dataclasses import replace

import pytest

from memsearcher_jax.checks import check
from memsearcher_jax.launch import tpu_train
from memsearcher_jax.launch.cli import load_preset
from memsearcher_jax.logs.metrics import read_metrics
from memsearcher_jax.rl.setup import check_teacher
from memsearcher_jax.runs.export_settings import without_local_files
from memsearcher_jax.runs.run_dir import PACKAGED_TOKENIZER
from memsearcher_jax.tokenizer import ChatTokenizer
from memsearcher_jax.training.config import TeacherConfig
from tests.support import SMALL_RUN, byte_tokenizer, with_flags

TOKENIZER = ChatTokenizer.load(PACKAGED_TOKENIZER)


def trained(out, *flags):
    tpu_train.main([*with_flags(SMALL_RUN.split(), *flags), "--out", str(out)])
    steps = read_metrics(out / "metrics.jsonl")
    return [{name: value for name, value in step.items() if not name.startswith(("time/", "host_"))} for step in steps]


@pytest.mark.slow
def test_a_run_of_another_size_teaches_carried_trajectories_and_adapters(tmp_path, fast_compile, refused):
    """And a resumed run equals an uninterrupted one."""
    teacher, student = tmp_path / "teacher", tmp_path / "student"
    trained(teacher, "--model.embed_size", "16", "--seed", "1")
    trained(student, "--rl.steps", "1")
    flags = ["--teacher.path", str(teacher), "--training.objective", "grpo+distill", "--teacher.on", "wrong"]
    flags += ["--model.path", str(student), "--model.lora_rank", "2"]
    whole, carried = trained(tmp_path / "whole", *flags), trained(tmp_path / "carried", *flags, "--rl.carry_over", "1")
    assert all(step["teacher_kl"] > 0.1 and step["kl"] > 0 for step in (*whole, *carried))
    trained(tmp_path / "parts", *flags, "--rl.steps", "1")
    tpu_train.main(["--resume", "--out", str(teacher), "--rl.steps", "3"])
    resume = ["--resume", "--out", str(tmp_path / "parts"), "--rl.steps", "2"]
    assert "teacher.path has changed since the run" in refused(tpu_train.main, resume)
    shutil.rmtree(teacher / "checkpoints" / "3")
    tpu_train.main(resume)
    assert read_metrics(tmp_path / "parts" / "metrics.jsonl")[1]["loss"] == whole[1]["loss"]


@pytest.mark.parametrize(
    ("teacher", "training", "message"),
    [
        (TeacherConfig(), {"objective": "distill"}, "objective distill needs a teacher"),
        (TeacherConfig("t"), {"kl_coefficient": 0.0}, "the teacher teaches nothing"),
        (TeacherConfig("t", top_k=4), {}, "the teacher teaches nothing"),
        (TeacherConfig("t", on="wrong"), {}, "teacher.on wrong has no effect under training.objective grpo"),
        (TeacherConfig(coefficient=2.0), {}, "teacher.coefficient 2.0 has no effect under training.objective grpo"),
        (
            TeacherConfig("t", top_k=10**6),
            {"objective": "distill", "kl_coefficient": 0.0},
            "top_k 1000000 is more than the .* tokens of the model: lower it",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(teacher, training, message):
    config = load_preset("nano")
    with pytest.raises(ValueError, match=message):
        check(replace(config, teacher=teacher, training=replace(config.training, **training)))


def test_an_export_names_no_teacher():
    config = load_preset("nano")
    training = replace(config.training, objective="distill")
    exported = check(without_local_files(replace(config, training=training, teacher=TeacherConfig("/home/me/teacher"))))
    assert exported.teacher == TeacherConfig()


def test_a_teacher_with_other_tokens_is_refused_by_the_first_of_them(tmp_path):
    config = replace(load_preset("tiny"), teacher=TeacherConfig("package:tiny"))
    check_teacher(config, TOKENIZER)
    with pytest.raises(ValueError, match="package:tiny has another vocabulary: its token 256 is 'he', and the"):
        check_teacher(config, byte_tokenizer())
