"""Who may import whom: the table of rooms, read from the source of every module, imports inside functions included."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "memsearcher_jax"

# What a room may import beside itself and the standard library: modules of this package, or whole distributions.
# A name stands for itself and everything under it. `memsearcher_jax.jsonl` is standard library only, for every room.
JSONL = f"{PACKAGE}.jsonl"
TYPES = f"{PACKAGE}.agent.types"
ROOMS = {
    "agent": {TYPES, "json_repair"},  # pure Python itself
    "data": {TYPES, JSONL, "numpy", "pyarrow", "tensorflow_datasets"},
    "retrieval": {TYPES, JSONL, "numpy", "scann", "bm25s", "fastapi", "pydantic"},
    "model": {"numpy", "jax", "flax", "safetensors"},  # the only room with flax
    "sampling": {f"{PACKAGE}.model", "numpy", "jax"},
    "training": {f"{PACKAGE}.model", "numpy", "jax", "optax", "orbax", "tensorstore"},
    "report": {TYPES, JSONL, "numpy", "matplotlib", "tensorboardX", "rich"},
}
# The hallway knows every room. Nobody in the package knows the fakes of testing.py.
ROOMS["rl"] = {f"{PACKAGE}.{room}" for room in ROOMS} | {f"{PACKAGE}.config", JSONL}
ROOMS["rl"] |= {"numpy", "jax", "tokenizers", "fsspec"}
# Modules beside the rooms. config.py joins the rooms' settings and is quick to import: a test below keeps jax away.
BESIDE = {
    "__init__": set(),
    "jsonl": set(),
    "config": {f"{PACKAGE}.{room}" for room in ROOMS},
    "testing": {PACKAGE, "numpy", "tokenizers"},
}
OUTSIDE = {
    "configs": {PACKAGE},
    # A command finds the modules beside it by their bare names; nothing else can.
    "launch": {
        PACKAGE,
        "numpy",
        "jax",
        "rich",
        "tyro",
        "uvicorn",
        *(path.stem for path in (ROOT / "launch").glob("*.py")),
        "pod",
    },
}
MOST_LINES = 350
ONE_PAGE = 100


def modules(*folders):
    """Every Python file under these folders of the checkout, as paths relative to it."""
    return sorted(path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(source, module):
    """Absolute names that `source` imports, anywhere in it; `from a import b` gives `a.b`, for b may be a module."""
    package = module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "importlib.import_module"):
            argument = node.args[0] if node.args else None
            found.add(argument.value if isinstance(argument, ast.Constant) else "a computed name")
    return found


def forbidden(path, source):
    """The imports of one module that its room may not have."""
    module = ".".join(path.with_suffix("").parts)
    top, second = (*path.with_suffix("").parts, "")[:2]
    if top != PACKAGE:
        allowed = OUTSIDE[top]
    elif len(path.parts) == 2:
        allowed = BESIDE[second]
    else:
        allowed = ROOMS[second] | {f"{PACKAGE}.{second}"}
    return {
        name
        for name in imports(source, module)
        if name.split(".")[0] not in sys.stdlib_module_names
        and not any(name == prefix or name.startswith(prefix + ".") for prefix in allowed)
    }


@pytest.mark.parametrize("path", modules(PACKAGE, "configs", "launch"), ids=str)
def test_a_module_imports_only_what_its_room_may(path):
    assert not forbidden(path, (ROOT / path).read_text(encoding="utf-8"))


def test_every_folder_of_the_package_is_a_room():
    folders = {path.name for path in (ROOT / PACKAGE).iterdir() if any(path.glob("*.py"))}
    assert folders == set(ROOMS)


@pytest.mark.parametrize(
    ("path", "source", "refused"),
    [
        ("agent/play.py", "import json\nfrom memsearcher_jax.agent.types import Say", set()),
        ("agent/play.py", "def late():\n    import numpy as np", {"numpy"}),
        ("agent/play.py", "from ..rl import tokens", {f"{PACKAGE}.rl.tokens"}),
        ("agent/play.py", "from . import types", set()),
        ("agent/play.py", "if TYPE_CHECKING:\n    from jax import Array", {"jax.Array"}),
        ("agent/play.py", "import importlib\nimportlib.import_module('jax')", {"jax"}),
        ("agent/play.py", "__import__(name)", {"a computed name"}),
        ("report/plots.py", "from memsearcher_jax.agent import types", set()),
        ("report/plots.py", "from memsearcher_jax.agent import reward", {f"{PACKAGE}.agent.reward"}),
        ("report/plots.py", "from memsearcher_jax.agent.types_of_mine import x", {f"{PACKAGE}.agent.types_of_mine.x"}),
        ("sampling/cache.py", "from memsearcher_jax.training import rows", {f"{PACKAGE}.training.rows"}),
        ("training/rows.py", "from memsearcher_jax import sampling", {f"{PACKAGE}.sampling"}),
        ("training/update.py", "import flax.linen as nn", {"flax.linen"}),
        ("rl/loop.py", "import launch.cli, cli", {"launch.cli", "cli"}),
        ("rl/loop.py", "from memsearcher_jax.testing import TinyIndex", {f"{PACKAGE}.testing.TinyIndex"}),
        ("config.py", "import jax", {"jax"}),
    ],
)
def test_the_rule_itself(path, source, refused):
    assert forbidden(Path(PACKAGE, path), source) == refused


@pytest.mark.parametrize("path", [path for path in modules(PACKAGE) if path.name == "__init__.py"], ids=str)
def test_init_files_are_empty(path):
    assert (ROOT / path).read_bytes() == b""


@pytest.mark.parametrize("folder", ["agent", "report"])
def test_importing_a_room_never_imports_jax(folder):
    names = [".".join(path.with_suffix("").parts) for path in modules(f"{PACKAGE}/{folder}")]
    program = f"import sys, {', '.join(names)}\nprint(sorted(name for name in sys.modules if name.startswith('jax')))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_importing_the_config_never_imports_jax():
    program = f"import sys, {PACKAGE}.config\nprint('jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


@pytest.mark.parametrize("path", modules(PACKAGE, "configs", "launch", "tests"), ids=str)
def test_a_file_stays_readable_in_one_sitting(path):
    assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_the_loop_stays_on_one_page():
    assert len((ROOT / PACKAGE / "rl" / "loop.py").read_text(encoding="utf-8").splitlines()) <= ONE_PAGE
