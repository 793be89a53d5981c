"""Runs whose --out is in a bucket, and commands that are repeated after every stop."""

import contextlib
import gc
from pathlib import Path

import evaluate
import export_hf
import fsspec
import pytest
import tpu_train
import workplace

from memsearcher_jax.config import RunConfig
from memsearcher_jax.report.metrics import read_metrics
from memsearcher_jax.rl.bucket import Bucket
from memsearcher_jax.rl.run_folder import RUN_FILE, write_run_config

ADDRESS = "gs://bucket/runs/a"


@pytest.fixture
def empty_bucket(bucket_server):
    bucket_server.wipe(keep_buckets=True)


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def begun(empty_bucket, tmp_path):
    """A run in the bucket, as its first second leaves it."""
    one = Bucket(ADDRESS, tmp_path / "a")
    one.mark()
    write_run_config(one.folder, RunConfig())
    one.send()
    gc.collect()  # connections that were left open say so when they are collected: not in the midst of a test


def test_a_folder_of_this_machine_is_left_as_it_is(stack):
    words = ["--config", "nano", "--out", "runs/a", "--rl.steps", "3"]
    assert workplace.settle(words, stack) == (words, None)


def test_a_repeated_command_starts_what_is_not_there_and_goes_on_with_what_is(stack, tmp_path):
    words = ["--config", "nano", "--start_or_resume", "--out", str(tmp_path / "a")]
    assert workplace.settle(words, stack) == (words, None)
    (tmp_path / "a").mkdir()
    write_run_config(tmp_path / "a", RunConfig())
    assert workplace.settle(words, stack) == ([*words, "--resume"], None)


@pytest.mark.parametrize("out", [["--out", ADDRESS], [f"--out={ADDRESS}"]])
def test_a_new_run_in_a_bucket_is_worked_on_in_a_folder_here(out, empty_bucket, stack):
    words, bucket = workplace.settle(["--start_or_resume", *out], stack)
    assert bucket.address == ADDRESS
    assert words == ["--start_or_resume", *(word.replace(ADDRESS, str(bucket.folder)) for word in out)]
    assert bucket.folder.is_dir()
    stack.close()
    assert not bucket.folder.exists()


def test_a_run_in_a_bucket_goes_on_with_what_it_left(begun, stack):
    words, bucket = workplace.settle(["--start_or_resume", "--out", ADDRESS], stack)
    assert words == ["--start_or_resume", "--out", str(bucket.folder), "--resume"]
    assert (bucket.folder / RUN_FILE).is_file()


def test_it_is_never_written_over(begun, refused):
    assert f"--out {ADDRESS} holds a run" in refused(tpu_train.main, ["--out", ADDRESS])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--resume", "--out", ADDRESS], f"--out {ADDRESS} holds no run"),
        (["--start_or_resume"], "--start_or_resume needs --out"),
        (["--out", "gs://bucket"], "--out gs://bucket: name a folder as gs://BUCKET/FOLDER"),
        (["--out", "s3://bucket/a"], "--out s3://bucket/a: name a folder as gs://BUCKET/FOLDER"),
        (["--out", ADDRESS, "--config", "tiny_warmstart"], "rl.method demonstrations writes to a disk alone"),
        (["--out", ADDRESS, "--checkpoint", "gs://bucket/b"], "--checkpoint gs://bucket/b: only --out of"),
    ],
)
def test_what_it_refuses(words, line, empty_bucket, refused):
    assert line in refused(tpu_train.main, words)
    assert fsspec.filesystem("gs", use_listings_cache=False).find("bucket") == []


@pytest.mark.parametrize("program", [evaluate.main, export_hf.main])
@pytest.mark.parametrize("flag", ["--out", "--checkpoint"])
def test_other_programs_ask_for_a_copy(program, flag, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refused(program, [flag, ADDRESS])
    assert line.endswith(f"copy it here, gcloud storage cp --recursive {ADDRESS} FOLDER")
    assert list(Path().iterdir()) == []


@pytest.mark.slow
def test_a_run_in_a_bucket_is_whole_and_goes_on_on_another_machine(small, empty_bucket, tmp_path, capsys):
    words = [*small, "--start_or_resume", "--out", ADDRESS]
    tpu_train.main([*words, "--rl.steps", "1", "--profile", "0"])
    assert f"{ADDRESS}: step 1 done" in capsys.readouterr().out
    tpu_train.main(words)
    copy = tmp_path / "copy"
    fsspec.filesystem("gs", use_listings_cache=False).get(ADDRESS, str(copy), recursive=True)
    assert [line["step"] for line in read_metrics(copy / "metrics.jsonl")] == [0, 1]
    assert {path.name for path in copy.iterdir()} == {
        *("run.json", "metrics.jsonl", "tensorboard", "trajectories", "tokenizer", "checkpoints"),
        *("curves.png", "report.html", "profile"),
    }
    (trace,) = copy.rglob("*.xplane.pb")
    assert all(phase in trace.read_bytes() for phase in (b"rollout", b"share", b"update", b"write"))
    export_hf.main(["--checkpoint", str(copy), "--out", str(tmp_path / "hf")])
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    tpu_train.main(words)
    assert f"{ADDRESS}: step 2 of 2 is done already" in capsys.readouterr().out
