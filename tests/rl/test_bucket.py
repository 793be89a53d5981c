"""A run's folder that follows itself into a bucket, on an emulator of Cloud Storage."""

import fsspec
import pytest

from memsearcher_jax.report.metrics import read_metrics
from memsearcher_jax.rl import bucket
from memsearcher_jax.rl.bucket import Bucket, SendingWriter
from memsearcher_jax.rl.run_folder import checkpoints_of


@pytest.fixture
def address(bucket_server):
    bucket_server.wipe(keep_buckets=True)
    return "gs://bucket/runs/a"


@pytest.fixture
def here(address, tmp_path):
    """A folder of this machine for the address, with something of everything in it."""
    one = Bucket(address, tmp_path / "a")
    one.mark()
    for name, text in {
        "run.json": "{}",
        "metrics.jsonl": "1\n",
        "tokenizer/tokenizer.json": "{}",
        "trajectories/step_000000.jsonl.gz": "z",
        "run.json.partial": "half",
        "data/x": "d",
        "index/manifest.json": "i",
        ".index.abc/y": "half",
    }.items():
        path = one.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return one


def objects(address):
    files = fsspec.filesystem("gs", use_listings_cache=False)
    return {
        name.removeprefix(address.removeprefix("gs://")): files.cat(name).decode("latin-1")
        for name in files.find(address)
    }


def elsewhere(address, tmp_path):
    """The same run on another machine."""
    there = Bucket(address, tmp_path / "b")
    there.fetch()
    return there


def test_what_is_sent_is_the_run_and_nothing_half_written(here, address):
    assert not here.holds_run()
    here.send()
    assert here.holds_run()
    assert set(objects(address)) == {
        "/run.json",
        "/metrics.jsonl",
        "/tokenizer/tokenizer.json",
        "/trajectories/step_000000.jsonl.gz",
    }


def test_another_machine_goes_on_with_what_was_sent(here, address, tmp_path):
    here.send()
    there = elsewhere(address, tmp_path)
    assert (there.folder / "trajectories/step_000000.jsonl.gz").read_text() == "z"
    with (there.folder / "metrics.jsonl").open("a") as file:
        file.write("2\n")
    there.send()
    assert objects(address)["/metrics.jsonl"] == "1\n2\n"


def test_only_what_changed_is_sent(here, address, tmp_path, monkeypatch):
    sent = []
    files = bucket._files()
    put = files.put
    monkeypatch.setattr(files, "put", lambda paths, there: (sent.append(paths), put(paths, there)))
    monkeypatch.setattr(bucket, "_files", lambda: files)
    here.send()
    here.send()
    (here.folder / "run.json").write_text("{ }")
    here.send()
    assert [len(paths) for paths in sent] == [4, 0, 1]
    there = elsewhere(address, tmp_path)
    there.send()
    assert sent[-1] == []  # what was just fetched


def test_a_part_can_be_fetched(here, address, tmp_path):
    here.send()
    there = Bucket(address, tmp_path / "b")
    there.fetch(only=("run.json", "tokenizer"))
    assert sorted(path.name for path in there.folder.iterdir()) == ["run.json", "tokenizer"]


def test_checkpoints_of_the_bucket_are_not_fetched(here, address, tmp_path):
    here.send()
    fsspec.filesystem("gs").pipe(f"{address}/checkpoints/3/params/x", b"large")
    assert not (elsewhere(address, tmp_path).folder / "checkpoints").exists()


def test_a_folder_that_stands_for_a_bucket_has_its_checkpoints_there(here, tmp_path):
    assert checkpoints_of(here.folder) == "gs://bucket/runs/a/checkpoints"
    assert checkpoints_of(tmp_path / "c") == str(tmp_path / "c" / "checkpoints")


def test_each_step_of_the_metrics_is_sent(here, address, tmp_path):
    (here.folder / "metrics.jsonl").unlink()
    with SendingWriter(here) as writer:
        for step in range(2):
            writer.write(step, {"reward": step})
            there = elsewhere(address, tmp_path)
            assert [line["step"] for line in read_metrics(there.folder / "metrics.jsonl")] == list(range(step + 1))
    assert any("/tensorboard/" in name for name in objects(address))


def test_a_step_that_does_not_arrive_goes_with_the_next(here, address, monkeypatch, capsys):
    (here.folder / "metrics.jsonl").unlink()
    with SendingWriter(here) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(bucket, "_files", lambda: 1 / 0)
            writer.write(0, {"reward": 0})
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("step 0 is not in the bucket yet: gs://bucket/runs/a is out of reach (division by zero)")
        writer.write(1, {"reward": 1})
    assert objects(address)["/metrics.jsonl"].count("\n") == 2


@pytest.mark.parametrize("name", ["../run.json", "x/../../y"])
def test_no_object_leads_out_of_the_folder(name, tmp_path, monkeypatch):
    class Files:
        def ls(self, address, detail):
            return ["bucket/runs/a/x"]

        def find(self, top):
            return [f"bucket/runs/a/{name}"]

        def get(self, there, here):
            raise AssertionError(here)

    monkeypatch.setattr(bucket, "_files", Files)
    with pytest.raises(OSError, match="leads out of the folder"):
        Bucket("gs://bucket/runs/a", tmp_path).fetch()


@pytest.mark.parametrize(
    "address", ["gs://bucket", "gs://", "gs://b/a/../c", "gs://bucket/a b", "s3://bucket/a", "gs:/b/a"]
)
def test_what_is_no_folder_of_a_bucket(address):
    with pytest.raises(ValueError, match="name a folder as gs://BUCKET/FOLDER"):
        bucket.check_address(address)


def test_without_the_library_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(bucket.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'memsearcher_jax\[gcs\]'"):
        bucket.check_installed("gs://bucket/runs/a")
