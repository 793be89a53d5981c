"""Repositories of the Hub in place of directories, against a Hub on loopback."""

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants

from memsearcher_jax.config import RunConfig, settings, with_settings
from memsearcher_jax.launch import cli, evaluate, export_hf, tpu_train
from memsearcher_jax.runs import hub as hub_module
from memsearcher_jax.runs import model_card, run_dir
from memsearcher_jax.runs.export_settings import write_export_config
from memsearcher_jax.runs.run_dir import located
from tests.runs.hub_server import running_hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A running Hub, with an empty cache. The library reads its environment when it is imported."""
    with running_hub() as hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.address)
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield hub


def config(**values):
    return with_settings(RunConfig(), {name.replace("__", "."): value for name, value in values.items()})


def files_in(folder):
    return {path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()}


def test_a_repository_is_pinned_and_downloaded_once(hub):
    commit = hub.add("models/owner/model", {"config.json": b"{}", "1_Pooling/config.json": b"1", "model.bin": b"222"})
    pinned = hub_module.pinned(config(model__path="owner/model"))
    assert pinned.model.path == f"owner/model@{commit}"
    folder = hub_module.local(pinned).model.path
    assert files_in(folder) == {"config.json", "1_Pooling/config.json"}
    hub.requests.clear()
    assert hub_module.local(hub_module.pinned(pinned)).model.path == folder
    assert hub.requests == []


def test_a_revision_is_used(hub):
    hub.add("models/owner/model", {"config.json": b"new"})
    old = hub.add("models/owner/model", {"config.json": b"old"}, revision="v1.0")
    pinned = hub_module.pinned(config(retrieval__encoder="owner/model@v1.0"))
    assert pinned.retrieval.encoder == f"owner/model@{old}"
    assert (Path(hub_module.local(pinned).retrieval.encoder) / "config.json").read_bytes() == b"old"


def test_a_resumed_run_keeps_its_commit(hub):
    first = hub.add("models/owner/model", {"config.json": b"{}"})
    stored = hub_module.pinned(config(model__path="owner/model"))
    second = hub.add("models/owner/model", {"config.json": b"{ }"})
    again = config(model__path="owner/model")
    assert hub_module.pinned(again, stored).model.path == f"owner/model@{first}"
    assert hub_module.pinned(again).model.path == f"owner/model@{second}"
    other = config(model__path=f"owner/model@{second}")
    assert hub_module.pinned(other, stored).model.path == f"owner/model@{second}"


def test_a_corpus_is_one_file_of_a_dataset(hub):
    commit = hub.add("datasets/owner/passages", {"wiki/a.jsonl": b"{}\n", "b.jsonl": b""})
    pinned = hub_module.pinned(config(retrieval__corpus="hf://datasets/owner/passages/wiki/a.jsonl"))
    assert pinned.retrieval.corpus == f"hf://datasets/owner/passages@{commit}/wiki/a.jsonl"
    assert Path(hub_module.local(pinned).retrieval.corpus).read_bytes() == b"{}\n"
    missing = config(retrieval__corpus="hf://datasets/owner/passages/c.jsonl")
    with pytest.raises(OSError, match=r"retrieval.corpus .*Entry Not Found.*c.jsonl"):
        hub_module.local(hub_module.pinned(missing))


def test_a_file_of_a_dataset_or_of_this_machine(hub, tmp_path):
    hub.add("datasets/owner/questions", {"dev.json": b"[]"})
    assert hub_module.local_file("hf://datasets/owner/questions/dev.json", "--questions").read_bytes() == b"[]"
    assert hub_module.local_file(str(tmp_path / "q.json"), "--questions") == tmp_path / "q.json"
    with pytest.raises(OSError, match=r"--questions hf://datasets/owner/questions/train.json"):
        hub_module.local_file("hf://datasets/owner/questions/train.json", "--questions")


def test_the_benchmarks_of_a_dataset(hub):
    question = json.dumps({"id": "1", "question": "Who?", "golden_answers": ["A"]}).encode() + b"\n"
    hub.add("datasets/owner/data", {"nq/test.jsonl": question, "retrieval-corpus/wiki.jsonl": b""})
    root = hub_module.local(config(data__root="owner/data")).data.root
    assert files_in(root) == {"nq/test.jsonl"}
    assert evaluate.benchmark_entries("nq", "owner/data") == ("nq",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("owner/missing", "Repository Not Found"),
        ("owner/model@v9", "v9"),
        ("owner/gated", "gated"),
    ],
)
def test_what_cannot_be_downloaded_is_one_line(hub, name, message):
    hub.add("models/owner/model", {"config.json": b"{}"})
    hub.add("models/owner/gated", {"config.json": b"{}"})
    hub.gated.add("models/owner/gated")
    with pytest.raises(OSError) as raised:
        hub_module.local(hub_module.pinned(config(model__path=name)))
    assert str(raised.value).startswith(f"model.path {name}") and message in str(raised.value)
    assert f"see {hub.address}/{name.partition('@')[0]}; " in str(raised.value)
    assert "\n" not in str(raised.value)


def test_no_file_of_what_is_missing_is_requested(hub, tmp_path, monkeypatch):
    """The library repeats such a request for half a minute where there is no connection."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name, message in (("runs/x", "runs/ has nothing of that name"), ("owner/x", "Repository Not Found")):
        with pytest.raises(OSError, match=f"--checkpoint {name}: .*{message}"):
            cli.parse(tpu_train.Train, ["--checkpoint", name])
        assert set(hub.requests) <= {"GET /api/models/owner/x"}


def test_offline_the_cache_is_enough(hub, monkeypatch):
    commit = hub.add("models/owner/model", {"config.json": b"{}"})
    folder = hub_module.local(hub_module.pinned(config(model__path="owner/model"))).model.path
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    pinned = hub_module.pinned(config(model__path="owner/model"))
    assert pinned.model.path == f"owner/model@{commit}"
    assert hub_module.local(pinned).model.path == folder
    with pytest.raises(OSError, match=r"model.path owner/other: there is no such path, and no download"):
        hub_module.pinned(config(model__path="owner/other"))


@pytest.mark.parametrize("name", ["", "package:tiny", "/root/model", "runs/a/b", "hashing", "./model"])
def test_other_values_are_no_repositories(name):
    assert not hub_module.is_repository(name)


def test_commands_take_repositories(hub, tmp_path, capsys):
    files = {path.name: path.read_bytes() for path in located("package:tiny").iterdir()}
    commit = hub.add("models/owner/tiny", files)
    flags = cli.parse(tpu_train.Train, ["--config", "tiny", "--checkpoint", "owner/tiny"])
    assert settings(flags.run)["model.path"] == f"owner/tiny@{commit}"
    export_hf.main(["--config", "tiny", "--checkpoint", "owner/tiny", "--out", str(tmp_path / "out")])
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("flags", [["--checkpoint", "owner/own"], ["--model.path", "DIR", "--model.adapter=owner/own"]])
def test_exported_weights_bring_their_settings(hub, tmp_path, flags):
    """Also from the Hub, with templates of one's own, as the model card says."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "system.txt").write_text("Answer.")
    write_export_config(tmp_path, with_settings(cli.load_preset("tiny"), {"agent.prompts": str(tmp_path / "own")}))
    names = ("memsearcher.json", "templates/system.txt")
    hub.add("models/owner/own", {name: (tmp_path / name).read_bytes() for name in names} | {"config.json": b"{}"})
    used = cli.parse(tpu_train.Train, flags).run
    assert used.model.vocab_size == cli.load_preset("tiny").model.vocab_size
    assert (Path(used.agent.prompts) / "system.txt").read_text() == "Answer."


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A finished run as far as a model card reads it: settings, program, results and curves."""
    folder = tmp_path / "run"
    folder.mkdir()
    run_dir.write_run_config(
        folder, config(model__path="Qwen/Qwen2.5-7B@" + "0" * 40, retrieval__corpus="/home/me/wiki")
    )
    steps = (json.dumps({"step": number, "reward": 0.4 + 0.2 * (number % 2)}) for number in range(30))
    (folder / "inputs.json").write_text(json.dumps({"program": [{"version": "0.2.0", "commit": "abc"}]}))
    (folder / "metrics.jsonl").write_text("\n".join(steps))
    (folder / "curves.png").write_bytes(b"png")
    return folder


def test_a_model_card_is_made_from_the_run(run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    model_card.write_model_card(out, run, name="me/agent", license="mit", adapter=False)
    card = ModelCard.load(out / "README.md")
    assert (card.data.license, card.data.base_model, card.data.library_name) == (
        "mit",
        "Qwen/Qwen2.5-7B",
        "transformers",
    )
    assert "30 steps; means over the last 10: reward 0.500." in card.text
    assert "memsearcher.json" in card.text and "/home/me" not in card.text
    assert "commit abc" in card.text and (out / "curves.png").read_bytes() == b"png"
