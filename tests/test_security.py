"""Unsafe uses of files, keys and addresses, checked in the source and at run time."""

import ast
import contextlib
import io
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from memsearcher_jax.http.listener import listen
from memsearcher_jax.launch import serve_search
from memsearcher_jax.model import hf_config, safetensors_files
from memsearcher_jax.retrieval import bm25, scann_index
from memsearcher_jax.retrieval.config import RetrievalConfig
from memsearcher_jax.retrieval.corpus import open_corpus
from memsearcher_jax.retrieval.search import open_searcher
from memsearcher_jax.retrieval.server.client import RequestRejected, SearchClient
from memsearcher_jax.rl.completers import OpenAICompleter, open_openai_completer
from memsearcher_jax.rl.config import CompleterConfig, read_key
from memsearcher_jax.runs import run_dir
from memsearcher_jax.types import Passage

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path for top in ("memsearcher_jax", "launch", "configs") for path in (ROOT / top).rglob("*.py"))

# Loaders that may run code or write to paths given in an archive.
LOADERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "torch", "tarfile"}
CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "shutil.unpack_archive"),
    *("jax.experimental.serialize_executable.deserialize_and_load", "np.fromregex"),
}
ORBAX = {"Composite", "StandardSave", "StandardRestore", "JsonSave", "JsonRestore", "CheckpointArgs"}


def violations(source):
    """Descriptions of the lines in a module that violate the rules above."""
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
        # An archive may be read member by member, and YAML as plain values.
        is_yaml = called.startswith("yaml.") and called != "yaml.safe_load"
        extracts = called.endswith(".extractall") or re.search(r"(archive|zip).*\.extract$", called, re.IGNORECASE)
        if called in CALLS or is_yaml or extracts or called.endswith(".exec_module"):
            yield f"{node.lineno}: calls {called}"
        for keyword in node.keywords:
            if keyword.arg in ("allow_pickle", "trust_remote_code", "shell") and ast.unparse(keyword.value) != "False":
                yield f"{node.lineno}: passes {keyword.arg}"


@pytest.mark.parametrize(
    ("source", "violation"),
    [
        ("import pickle", "1: imports pickle"),
        ("def f():\n    from torch import load", "2: imports torch"),
        ("np.load(file, allow_pickle=True)", "1: passes allow_pickle"),
        ("AutoModel.from_pretrained(x, trust_remote_code=flag)", "1: passes trust_remote_code"),
        ("subprocess.run(line, shell=True)", "1: passes shell"),
        ("eval(text)", "1: calls eval"),
        ("archive.extractall(folder)", "1: calls archive.extractall"),
        ("zipfile.ZipFile(file).extract(name)", "1: calls zipfile.ZipFile(file).extract"),
        ("yaml.load(text, yaml.Loader)", "1: calls yaml.load"),
        ("ocp.args.PyTreeRestore(x)", "1: orbax handler PyTreeRestore"),
        ("np.load(file, allow_pickle=False)\nocp.args.JsonRestore()\nyaml.safe_load(text)", None),
    ],
)
def test_the_source_check_finds_violations(source, violation):
    assert next(violations(source), None) == violation


def test_no_module_deserializes_code():
    found = {str(path.relative_to(ROOT)): list(violations(path.read_text(encoding="utf-8"))) for path in SOURCES}
    own = found.pop("memsearcher_jax/python_files.py")  # of files that the user names on the command line
    assert [line.split(": ")[1] for line in own] == ["calls exec", "calls compile"]
    assert {name: lines for name, lines in found.items() if lines} == {}


class PicklePayload:
    """Creates a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.fixture
def created(tmp_path):
    """The path that a payload creates; the test fails if the file exists."""
    file = tmp_path / "created"
    yield file
    assert not file.exists()


def npy(payload):
    file = io.BytesIO()
    np.save(file, np.array([payload], object), allow_pickle=True)
    return file.getvalue()


def test_the_payload_runs_when_unpickled(tmp_path):
    np.load(io.BytesIO(npy(PicklePayload(tmp_path / "created"))), allow_pickle=True)
    assert (tmp_path / "created").exists()


def manifest(index):
    return json.loads((index / "manifest.json").read_text())


@pytest.fixture
def small_index(tmp_path):
    """An index folder of three passages."""
    passages = [Passage(str(n), f'"T{n}"\nwords of {n}') for n in range(3)]
    open_searcher(RetrievalConfig(index_type="exact", method="hybrid"), tmp_path / "index", passages)
    return tmp_path / "index"


def test_a_bm25_index_is_never_unpickled(small_index, created):
    corpus = open_corpus(small_index, manifest(small_index)["checksum"])
    (folder,) = (path.parent for path in small_index.rglob("vocab.index.json") if "title" not in path.parent.name)
    for path in folder.glob("*.npy"):
        path.write_bytes(npy(PicklePayload(created)))
    with pytest.raises(ValueError, match="is damaged or of another version"):
        bm25.open_bm25(corpus, folder)


def test_scann_never_gets_pickled_files(tmp_path, created):
    """ScaNN unpickles these files, so the folder is checked first."""
    (tmp_path / scann_index.ASSETS).write_text('assets {\n  asset_path: "dataset.npy"\n}\n')
    (tmp_path / scann_index.PICKLED).write_bytes(pickle.dumps(PicklePayload(created)))
    with pytest.raises(ValueError, match="do not trust it"):
        scann_index.load_tree(tmp_path, 3, 1, 1)


@pytest.mark.parametrize("name", ["/etc/passwd", "../x.npy", r"\056\056/x"])
def test_scann_never_gets_paths_outside_its_folder(name, tmp_path):
    (tmp_path / scann_index.ASSETS).write_text(f'assets {{\n  asset_path: "{name}"\n}}\n')
    with pytest.raises(ValueError, match="do not trust it"):
        scann_index.load_tree(tmp_path, 3, 1, 1)


def test_weights_are_read_only_from_safetensors(tmp_path, created):
    for name in ("pytorch_model.bin", "model.pt", "model.safetensors.pkl"):
        (tmp_path / name).write_bytes(pickle.dumps(PicklePayload(created)))
    with pytest.raises(FileNotFoundError, match="other formats are not read"):
        safetensors_files.open_files(tmp_path, stack=contextlib.ExitStack())
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(PicklePayload(created)))
    with pytest.raises(ValueError, match="no safetensors file"):
        safetensors_files.open_files(tmp_path, stack=contextlib.ExitStack())


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/model.safetensors", "a/../../b.safetensors"])
def test_a_weight_map_cannot_name_files_outside_its_folder(name, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ValueError, match="which is not in its folder"):
        safetensors_files.open_files(folder, stack=contextlib.ExitStack())


def test_code_of_a_model_folder_is_never_run(tmp_path, created):
    """`auto_map` is how folders bring their own classes."""
    (tmp_path / "code.py").write_text(f"from pathlib import Path\nPath({str(created)!r}).touch()\nclass Config: pass\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}))
    with pytest.raises(ValueError, match="contains custom code") as error:
        hf_config.read_config(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["", "..", "../..", "tiny/../..", "/etc"])
def test_a_package_path_stays_inside_the_package(name):
    with pytest.raises(ValueError, match="must be followed by the name of a directory of the package"):
        run_dir.located(f"package:{name}")
    assert run_dir.located("package:tiny").is_dir()


@pytest.mark.parametrize(
    "url", ["http://me:s3cret@host", "http://s3cret@host:port", "http://host/v1?key=s3cret", "http://host#s3cret"]
)
def test_a_secret_in_an_address_is_refused_and_not_repeated(url):
    with pytest.raises(ValueError, match="which would be stored and logged") as error:
        SearchClient(url)
    assert "s3cret" not in str(error.value)


def test_an_api_key_is_not_in_any_repr(monkeypatch):
    monkeypatch.setenv("THE_KEY", "s3cret")
    config = CompleterConfig(backend="openai", url="http://host", model="m", api_key_env="THE_KEY")
    completer = open_openai_completer(config, section="judge", max_tokens=1, temperature=0)
    assert completer.headers == {"Authorization": "Bearer s3cret"}
    assert "s3cret" not in repr(completer) + repr(config)


def test_a_key_is_read_without_the_line_break_of_a_mounted_secret(monkeypatch):
    monkeypatch.setenv("THE_KEY", "s3cret\n")
    assert read_key("THE_KEY", "judge.api_key_env") == "s3cret"
    monkeypatch.setenv("THE_KEY", "s3\ncret")
    with pytest.raises(ValueError, match=r"judge\.api_key_env: the key has characters") as error:
        read_key("THE_KEY", "judge.api_key_env")
    assert "cret" not in str(error.value)


def test_a_key_given_as_variable_name_is_not_repeated(monkeypatch):
    config = CompleterConfig(backend="openai", url="http://host", model="m", api_key_env="s3cret")
    with pytest.raises(ValueError) as error:
        open_openai_completer(config, section="judge", max_tokens=1, temperature=0)
    assert "s3cret" not in str(error.value)


def test_a_key_repeated_by_a_service_is_masked(monkeypatch):
    service = OpenAICompleter("http://host", headers={"Authorization": "Bearer s3cret"})
    body = b'{"error": "Incorrect API key provided: s3cret, header Bearer s3cret"}'

    async def send(self, *request):
        return 401, body

    monkeypatch.setattr(OpenAICompleter, "_send", send)
    with pytest.raises(RequestRejected) as error:
        service.request("POST", "/chat/completions", {})
    assert "Incorrect API key provided: ***" in str(error.value)
    assert "s3cret" not in str(error.value)


def test_the_search_service_listens_on_localhost_by_default():
    flags = serve_search.Serve()
    with listen(flags.host, 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def listeners(source):
    """Calls that open a listener, except those with the literal address 127.0.0.1. `inspect` binds arguments, too."""
    opening = ("create_server", "bind", "HTTPServer", "start_server", "uvicorn.run")
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    functions = ((call, ast.unparse(call.func)) for call in calls if call.args)
    opened = (call for call, name in functions if name.endswith(opening) and name != "signature.bind")
    return [ast.unparse(call.func) for call in opened if not ast.unparse(call.args[0]).startswith("('127.0.0.1', ")]


def test_only_services_listen_on_a_configurable_address():
    """The test above checks its default address."""
    assert listeners("socket.bind(('', 0))\nHTTPServer(('127.0.0.1', port), Handler)") == ["socket.bind"]
    calls_by_file = {path.name: listeners(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {name: calls for name, calls in calls_by_file.items() if calls} == {"listener.py": ["socket.create_server"]}
