"""What no part of the program may do with files, keys and addresses, in its source and in what it does."""

import ast
import contextlib
import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import serve_search

from memsearcher_jax.agent.types import Passage
from memsearcher_jax.model import hf_tensors
from memsearcher_jax.model.encoder_config import read_encoder_config
from memsearcher_jax.retrieval import approximate, bm25
from memsearcher_jax.retrieval.client import SearchService
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.corpus import open_corpus
from memsearcher_jax.retrieval.index import open_index
from memsearcher_jax.retrieval.json_service import Refused
from memsearcher_jax.retrieval.search import open_searcher
from memsearcher_jax.retrieval.vectors import Shards
from memsearcher_jax.rl import run_folder
from memsearcher_jax.rl.config import SpeakerConfig
from memsearcher_jax.rl.speakers import Endpoint, open_endpoint

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path for top in ("memsearcher_jax", "launch", "configs") for path in (ROOT / top).rglob("*.py"))

# Whatever they load may run code, or write where an archive says.
LOADERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "torch", "tarfile", "yaml"}
CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "shutil.unpack_archive"),
    *("jax.experimental.serialize_executable.deserialize_and_load", "np.fromregex", "zipfile.ZipFile"),
}
ORBAX = {"Composite", "StandardSave", "StandardRestore", "JsonSave", "JsonRestore", "CheckpointArgs"}


def offences(source):
    """Lines of a module that break the rules above, each with what it does."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (f"{node.lineno}: imports {name}" for name in names if name.split(".")[0] in LOADERS)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("ocp.args") and node.attr not in ORBAX:
            yield f"{node.lineno}: orbax handler {node.attr}"
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in CALLS or called.endswith((".extractall", ".exec_module")):
            yield f"{node.lineno}: calls {called}"
        for keyword in node.keywords:
            if keyword.arg in ("allow_pickle", "trust_remote_code", "shell") and ast.unparse(keyword.value) != "False":
                yield f"{node.lineno}: passes {keyword.arg}"


@pytest.mark.parametrize(
    ("source", "offence"),
    [
        ("import pickle", "1: imports pickle"),
        ("def f():\n    from torch import load", "2: imports torch"),
        ("np.load(file, allow_pickle=True)", "1: passes allow_pickle"),
        ("AutoModel.from_pretrained(x, trust_remote_code=flag)", "1: passes trust_remote_code"),
        ("subprocess.run(line, shell=True)", "1: passes shell"),
        ("eval(text)", "1: calls eval"),
        ("archive.extractall(folder)", "1: calls archive.extractall"),
        ("ocp.args.PyTreeRestore(x)", "1: orbax handler PyTreeRestore"),
        ("np.load(file, allow_pickle=False)\nocp.args.JsonRestore()\nimport json", None),
    ],
)
def test_the_rules_themselves(source, offence):
    assert next(offences(source), None) == offence


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_loads_what_may_run(path):
    found = list(offences(path.read_text(encoding="utf-8")))
    if path.name == "cli.py":  # a preset is a program that the user names
        assert [line.split(": ")[1] for line in found] == ["calls spec.loader.exec_module"]
    else:
        assert found == []


class Bomb:
    """Leaves a trace where it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return Path.touch, (self.place,)


@pytest.fixture
def hit(tmp_path):
    """A place that only a bomb makes; the test fails if one went off."""
    place = tmp_path / "hit"
    yield place
    assert not place.exists()


def npy(bomb):
    file = io.BytesIO()
    np.save(file, np.array([bomb], object), allow_pickle=True)
    return file.getvalue()


def test_a_bomb_goes_off_where_it_is_unpickled(tmp_path):
    np.load(io.BytesIO(npy(Bomb(tmp_path / "hit"))), allow_pickle=True)
    assert (tmp_path / "hit").exists()


def test_vectors_are_never_unpickled(tmp_path, hit):
    shards = Shards(tmp_path, rows=1, size=1, dtype="float32", shard_rows=1)
    shards.path(0).write_bytes(npy(Bomb(hit)))
    with pytest.raises(ValueError):
        shards[:]


@pytest.mark.parametrize("name", ["encoder.npz", "ids.offset.npy", "contents.offset.npy"])
def test_an_index_is_never_unpickled(name, small_index, hit):
    if name.endswith(".npz"):
        np.savez(small_index / name, np.array([Bomb(hit)], object))
    else:
        (small_index / name).write_bytes(npy(Bomb(hit)))
    with pytest.raises(ValueError, match="is damaged"):
        open_index(small_index, encoder=manifest(small_index)["config"]["encoder"], kind="exact")


def manifest(index):
    return json.loads((index / "manifest.json").read_text())


@pytest.fixture
def small_index(tmp_path):
    """An index folder of three passages."""
    passages = [Passage(str(n), f'"T{n}"\nwords of {n}') for n in range(3)]
    open_searcher(RetrievalConfig(kind="exact", method="hybrid"), tmp_path / "index", passages)
    return tmp_path / "index"


def test_an_index_of_words_is_never_unpickled(small_index, hit):
    corpus = open_corpus(small_index, manifest(small_index)["checksum"])
    (folder,) = (path.parent for path in small_index.rglob("vocab.index.json") if "title" not in path.parent.name)
    for path in folder.glob("*.npy"):
        path.write_bytes(npy(Bomb(hit)))
    with pytest.raises(ValueError, match="no BM25 index that can be read"):
        bm25.open_bm25(corpus, folder)


def test_scann_is_not_given_what_it_would_unpickle(tmp_path, hit):
    """The library itself does: that is why the folder is looked at first."""
    (tmp_path / approximate.ASSETS).write_text('assets {\n  asset_path: "dataset.npy"\n}\n')
    (tmp_path / approximate.PICKLED).write_bytes(pickle.dumps(Bomb(hit)))
    with pytest.raises(ValueError, match="do not trust it"):
        approximate.load_tree(tmp_path, 3, approximate.TreeSettings(1, 1, 1, 1, 1.0))


@pytest.mark.parametrize("name", ["/etc/passwd", "../x.npy", r"\056\056/x"])
def test_scann_is_not_given_names_of_files_elsewhere(name, tmp_path):
    (tmp_path / approximate.ASSETS).write_text(f'assets {{\n  asset_path: "{name}"\n}}\n')
    with pytest.raises(ValueError, match="do not trust it"):
        approximate.load_tree(tmp_path, 3, approximate.TreeSettings(1, 1, 1, 1, 1.0))


def test_weights_come_from_safetensors_alone(tmp_path, hit):
    for name in ("pytorch_model.bin", "model.pt", "model.safetensors.pkl"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb(hit)))
    with pytest.raises(FileNotFoundError, match="other formats are not read"):
        hf_tensors.open_files(tmp_path, stack=contextlib.ExitStack())
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Bomb(hit)))
    with pytest.raises(ValueError, match="no safetensors file"):
        hf_tensors.open_files(tmp_path, stack=contextlib.ExitStack())


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/model.safetensors", "a/../../b.safetensors"])
def test_an_index_of_weights_cannot_name_files_elsewhere(name, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ValueError, match="which is not in its folder"):
        hf_tensors.open_files(folder, stack=contextlib.ExitStack())


def test_an_encoder_cannot_name_a_folder_elsewhere(tmp_path):
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    rest = {"intermediate_size": 8, "max_position_embeddings": 8, "type_vocab_size": 1, "hidden_act": "gelu"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **sizes, **rest}))
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "../1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match="which is not in its folder"):
        read_encoder_config(tmp_path)


@pytest.mark.parametrize("name", ["", "..", "../..", "tiny/../..", "/etc"])
def test_a_packaged_folder_is_one_of_the_package(name):
    with pytest.raises(ValueError, match="must be the name of a folder of the package"):
        run_folder.located(f"package:{name}")
    assert run_folder.located("package:tiny").is_dir()


@pytest.mark.parametrize(
    "url", ["http://me:s3cret@host", "http://s3cret@host:port", "http://host/v1?key=s3cret", "http://host#s3cret"]
)
def test_addresses_hold_no_secret_and_none_is_repeated(url):
    with pytest.raises(ValueError, match="which would be stored and logged") as caught:
        SearchService(url)
    assert "s3cret" not in str(caught.value)


def test_a_key_is_in_no_text(monkeypatch):
    monkeypatch.setenv("THE_KEY", "s3cret")
    config = SpeakerConfig(who="endpoint", url="http://host", model="m", key_variable="THE_KEY")
    speaker = open_endpoint(config, section="judge", max_tokens=1, temperature=0)
    assert speaker.endpoint.headers == {"Authorization": "Bearer s3cret"}
    assert "s3cret" not in repr(speaker) + repr(config)


def test_a_key_that_was_given_as_a_name_is_not_repeated(monkeypatch):
    config = SpeakerConfig(who="endpoint", url="http://host", model="m", key_variable="s3cret")
    with pytest.raises(ValueError) as caught:
        open_endpoint(config, section="judge", max_tokens=1, temperature=0)
    assert "s3cret" not in str(caught.value)


def test_a_service_that_repeats_the_key_does_not_get_it_logged(monkeypatch):
    endpoint = Endpoint("http://host", headers={"Authorization": "Bearer s3cret"})
    told = b'{"error": "Incorrect API key provided: s3cret, header Bearer s3cret"}'
    monkeypatch.setattr("memsearcher_jax.retrieval.json_service._receive", lambda *_: (401, told))
    monkeypatch.setattr("http.client.HTTPConnection.request", lambda *_: None)
    with pytest.raises(Refused) as caught:
        endpoint.ask("POST", "/chat/completions", {})
    assert "Incorrect API key provided: ***" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_the_search_service_is_for_this_machine_unless_it_is_told_otherwise():
    flags = serve_search.Serve()
    with serve_search.listen(flags.host, 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def listeners(source):
    """Calls that open a listener, but for those that say themselves that it is for this machine."""
    opening = ("create_server", "bind", "HTTPServer", "start_server", "uvicorn.run")
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    opened = (call for call in calls if ast.unparse(call.func).endswith(opening))
    return [ast.unparse(call.func) for call in opened if not ast.unparse(call.args[0]).startswith("('127.0.0.1', ")]


def test_nothing_else_listens():
    """A listener whose address can be chosen is opened in one place, whose default is above."""
    assert listeners("socket.bind(('', 0))\nHTTPServer(('127.0.0.1', port), Handler)") == ["socket.bind"]
    found = {path.name: listeners(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {name: calls for name, calls in found.items() if calls} == {"serve_search.py": ["socket.create_server"]}
