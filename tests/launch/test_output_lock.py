"""Two commands never write one directory, and a refused command removes only what it made."""

import contextlib

import pytest

from memsearcher_jax.launch import evaluate, outputs, tpu_train
from tests.support import ScriptedPolicy

BUSY = "another process is writing --out"


def test_a_second_writer_is_refused_and_changes_nothing(scripted, finished, tmp_path, refused, small, snapshot):
    answer = ["No.</think>\n\\boxed{unknown}"]
    _, evaluated = scripted(lambda problem: ScriptedPolicy(answer), "--evaluation.max_questions", "2")
    started = tmp_path / "run"
    (started / "data").mkdir(parents=True)
    (started / "data" / "questions").write_text("kept")
    for main, flags, out in (
        (tpu_train.main, small, started),
        (tpu_train.main, ["--resume", "--rl.steps", "3"], finished),
        (evaluate.main, ["--resume"], evaluated),
    ):
        before = snapshot(out)
        with outputs.output_lock(out):
            assert BUSY in refused(main, [*flags, "--out", out])
        assert snapshot(out) == before


def test_a_failed_start_leaves_no_empty_directory(tmp_path):
    with pytest.raises(KeyError), outputs.new_output_dir(tmp_path / "runs" / "a" / "b", "train") as out:
        (out / "data").mkdir()
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "kept").write_text("kept")
    with pytest.raises(KeyError), outputs.new_output_dir(tmp_path / "runs" / "a", "train"):
        raise KeyError
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["kept"]


def test_the_lock_outlives_the_start(tmp_path):
    with contextlib.ExitStack() as job:
        with outputs.new_output_dir(tmp_path / "a", "train", locks=job):
            pass
        with pytest.raises(ValueError, match=BUSY), outputs.output_lock(tmp_path / "a"):
            pass
    assert list((tmp_path / "a").iterdir()) == []
