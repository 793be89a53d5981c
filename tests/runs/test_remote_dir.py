"""A run directory that is mirrored to a bucket, on an emulator of Cloud Storage."""

import fsspec
import pytest

from memsearcher_jax.logs.metrics import read_metrics
from memsearcher_jax.runs import remote_dir
from memsearcher_jax.runs.remote_dir import RemoteDir, UploadingWriter

UPLOADED = ("run.json", "metrics.jsonl", "tokenizer/tokenizer.json", "trajectories/step_000000.jsonl.gz")


@pytest.fixture
def address(bucket_server):
    bucket_server.wipe(keep_buckets=True)
    return "gs://bucket/runs/a"


@pytest.fixture
def local_run(address, tmp_path):
    """A local directory linked to the address, with every kind of file that a run has."""
    remote = RemoteDir(address, tmp_path / "a")
    remote.link()
    for name in (*UPLOADED, "run.json.partial", "data/x", "index/manifest.json", ".index.abc/y"):
        path = remote.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    return remote


def objects(address):
    names = fsspec.filesystem("gs", use_listings_cache=False).find(address)
    return {name.removeprefix(address.removeprefix("gs://")).lstrip("/") for name in names}


def fetch_copy(address, tmp_path):
    """The same run, fetched into the directory of another machine."""
    copy = RemoteDir(address, tmp_path / "b")
    copy.fetch()
    return copy


def test_send_uploads_the_run_without_partial_files(local_run, address):
    assert not local_run.holds("run.json")
    local_run.send()
    assert local_run.holds("run.json")
    assert objects(address) == set(UPLOADED)


def test_uploaded_trajectories_take_no_disk_and_some_are_fetched_for_the_report(local_run, address, tmp_path):
    for step in range(1, 4):
        (local_run.folder / f"trajectories/step_{step:06d}.jsonl.gz").write_text(str(step))
    local_run.send()
    assert list((local_run.folder / "trajectories").iterdir()) == []
    copy = fetch_copy(address, tmp_path)
    assert not (copy.folder / "trajectories").exists()
    copy.fetch_trajectories(2)
    names = [path.name for path in sorted((copy.folder / "trajectories").iterdir())]
    assert names == ["step_000000.jsonl.gz", "step_000003.jsonl.gz"]


def test_a_run_exists_only_when_its_other_files_are_uploaded(local_run, monkeypatch):
    files = remote_dir._file_system()
    monkeypatch.setattr(files, "put", lambda paths, copy: 1 / 0)
    monkeypatch.setattr(remote_dir, "_file_system", lambda: files)
    with pytest.raises(OSError, match="transfer failed"):
        local_run.send()
    assert not local_run.holds("run.json")


def test_send_uploads_only_changed_files(local_run, address, tmp_path, monkeypatch):
    sent = []
    files = remote_dir._file_system()
    put = files.put
    monkeypatch.setattr(files, "put", lambda paths, copy: (sent.append(len(paths)), put(paths, copy)))
    monkeypatch.setattr(remote_dir, "_file_system", lambda: files)
    local_run.send()
    local_run.send()
    (local_run.folder / "run.json").write_text("{ }")
    local_run.send()
    fetch_copy(address, tmp_path).send()
    assert sent == [3, 1, 0, 0, 0, 1, 0, 0]


def test_metrics_are_uploaded_after_each_step_or_with_the_next(local_run, address, tmp_path, monkeypatch, capsys):
    (local_run.folder / "metrics.jsonl").unlink()
    with UploadingWriter(local_run) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(remote_dir, "_file_system", lambda: 1 / 0)
            writer.write(0, {"reward": 0})
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("step 0 is not uploaded yet: gs://bucket/runs/a: transfer failed (division by zero)")
        for step in (1, 2):
            writer.write(step, {"reward": step})
            copy = fetch_copy(address, tmp_path)
            assert [line["step"] for line in read_metrics(copy.folder / "metrics.jsonl")] == list(range(step + 1))
    assert any(name.startswith("tensorboard/") for name in objects(address))


@pytest.mark.parametrize("name", ["../run.json", "x/../../y"])
def test_no_object_is_written_outside_the_directory(name, tmp_path, monkeypatch):
    class Files:
        def ls(self, address, detail):
            return ["bucket/runs/a/x"]

        def find(self, top):
            return [f"bucket/runs/a/{name}"]

        def get(self, copy, local_run):
            raise AssertionError(local_run)

    monkeypatch.setattr(remote_dir, "_file_system", Files)
    with pytest.raises(OSError, match="outside the run directory"):
        RemoteDir("gs://bucket/runs/a", tmp_path).fetch()


@pytest.mark.parametrize(
    "address", ["gs://bucket", "gs://", "gs://b/a/../c", "gs://bucket/a b", "s3://bucket/a", "gs:/b/a"]
)
def test_an_invalid_bucket_address_is_an_error(address):
    with pytest.raises(ValueError, match="give gs://BUCKET/DIR"):
        remote_dir.check_address(address)
