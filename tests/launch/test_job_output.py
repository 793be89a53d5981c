"""Runs with --out in a bucket, and --start_or_resume."""

import contextlib
import gc
from dataclasses import replace

import fsspec
import pytest

from memsearcher_jax.config import RunConfig
from memsearcher_jax.hosts.distributed import Hosts
from memsearcher_jax.launch import cli, export_hf, job_output, tpu_train
from memsearcher_jax.logs.metrics import read_metrics
from memsearcher_jax.runs.remote_dir import RemoteDir
from memsearcher_jax.runs.run_dir import RUN_FILE, write_run_config
from tests.support import with_flags

ADDRESS = "gs://bucket/runs/a"


@pytest.fixture
def empty_bucket(bucket_server):
    bucket_server.wipe(keep_buckets=True)


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def started_run(empty_bucket, tmp_path):
    """A run in the bucket that has only written its config and what it was given."""
    remote = RemoteDir(ADDRESS, tmp_path / "a")
    remote.link()
    (remote.folder / "inputs" / "0").mkdir(parents=True)
    (remote.folder / "inputs" / "0" / "train.jsonl").write_text("")
    (remote.folder / "inputs.json").write_text("{}")
    write_run_config(remote.folder, RunConfig())
    remote.send()
    gc.collect()  # open connections warn when they are collected: do it before the test


def localize(arguments, stack):
    source, _ = cli.parse_source(tpu_train.Train, arguments)
    return source, *job_output.localize(source, stack)


def test_the_error_without_gcsfs_names_the_extra(stack, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"--out {ADDRESS}: gcsfs is not .*: pip install 'memsearcher_jax\[gcs\]'"):
        localize(["--out", ADDRESS], stack)


def test_start_or_resume_resumes_only_an_existing_run(stack, tmp_path):
    arguments = ["--config", "nano", "--start_or_resume", "--out", str(tmp_path / "a")]
    for unchanged in (arguments, ["--config", "nano", "--out", "runs/a", "--rl.steps", "3"]):
        given, source, remote = localize(unchanged, stack)
        assert (source, remote) == (given, None)
    (tmp_path / "a").mkdir()
    write_run_config(tmp_path / "a", RunConfig())
    given, source, remote = localize(arguments, stack)
    assert (source, remote) == (replace(given, resume=True), None)


def test_a_new_run_in_a_bucket_has_a_temporary_local_directory(empty_bucket, stack):
    given, source, remote = localize(["--start_or_resume", f"--out={ADDRESS}"], stack)
    assert remote.address == ADDRESS
    assert source == replace(given, out=remote.folder)
    assert remote.folder.is_dir()
    stack.close()
    assert not remote.folder.exists()


def test_a_run_in_a_bucket_is_resumed_and_never_overwritten(started_run, stack, refused):
    given, source, remote = localize(["--start_or_resume", "--out", ADDRESS], stack)
    assert source == replace(given, out=remote.folder, resume=True)
    own = {path.relative_to(remote.folder).as_posix() for path in remote.folder.rglob("*") if path.is_file()}
    assert own == {RUN_FILE, "bucket.json", "inputs.json", "inputs/0/train.jsonl"}, "which every host reads"
    assert f"--out {ADDRESS} holds a run" in refused(tpu_train.main, ["--out", ADDRESS])
    files = fsspec.filesystem("gs", use_listings_cache=False)
    files.mv(f"{ADDRESS}/{RUN_FILE}", f"{ADDRESS}/checkpoints/1/meta")
    assert "holds checkpoints/, but no run.json" in refused(tpu_train.main, ["--start_or_resume", "--out", ADDRESS])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--resume", "--out", ADDRESS], f"--out {ADDRESS} holds no run"),
        (["--start_or_resume"], "--start_or_resume needs --out"),
        (["--out", ADDRESS, "--checkpoint", "gs://bucket/b"], "--checkpoint gs://bucket/b: only --out of"),
    ],
)
def test_invalid_flags_are_errors(arguments, line, empty_bucket, refused):
    assert line in refused(tpu_train.main, arguments)
    assert fsspec.filesystem("gs", use_listings_cache=False).find("bucket") == []


@pytest.mark.parametrize("theirs", [".", "other"])
def test_hosts_with_directories_of_their_own_are_refused(theirs, tmp_path):
    names = []

    class First(Hosts):  # the other host sees the directory `theirs`
        def exchange(self, content):
            names.append(content.decode())
            return [content, b"yes" if (tmp_path / theirs / names[0]).exists() else b"no"]

    with (
        contextlib.nullcontext() if theirs == "." else pytest.raises(ValueError, match="not the same directory on all")
    ):
        job_output.require_shared(tmp_path, First(0, 2))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_in_a_bucket_is_complete_and_resumes_on_another_machine(small, empty_bucket, tmp_path, capsys):
    arguments = [*small, "--start_or_resume", "--out", ADDRESS]
    tpu_train.main([*with_flags(arguments, "--rl.steps", "1"), "--profile", "0"])
    assert f"{ADDRESS}: step 1 done" in capsys.readouterr().out
    tpu_train.main(arguments)
    copy = tmp_path / "copy"
    fsspec.filesystem("gs", use_listings_cache=False).get(ADDRESS, str(copy), recursive=True)
    assert [line["step"] for line in read_metrics(copy / "metrics.jsonl")] == [0, 1]
    assert {path.name for path in copy.iterdir()} == {
        *("run.json", "metrics.jsonl", "tensorboard", "trajectories", "tokenizer", "checkpoints"),
        *("curves.png", "report.html", "inputs.json", "results.json", "profile"),
    }
    (trace,) = copy.rglob("*.xplane.pb")
    assert all(phase in trace.read_bytes() for phase in (b"rollout", b"gather", b"update", b"write"))
    export_hf.main(["--checkpoint", str(copy), "--out", str(tmp_path / "hf")])
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    tpu_train.main(arguments)
    assert f"{ADDRESS}: step 2 of 2 is already done" in capsys.readouterr().out
