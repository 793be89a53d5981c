"""The imports that each package may have, checked in the source of every module, also inside functions."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "memsearcher_jax"

# What a package may import in addition to itself and the standard library: modules of this package or distributions.
# A name includes all its submodules.
NAMES = ("types", "jsonl", "ranges", "analyzer", "python_files", "canonical")
TYPES, JSONL, RANGES, ANALYZER, PYTHON_FILES, CANONICAL = SHARED = [f"{PACKAGE}.{name}" for name in NAMES]
CONFIG, TOKENIZER, CHAT_TEMPLATE = (f"{PACKAGE}.{name}" for name in ("config", "tokenizer", "chat_template"))
AGENT, HTTP, RETRIEVAL, LOGS, REPORT = (
    f"{PACKAGE}.{name}" for name in ("agent", "http", "retrieval", "logs", "report")
)
OPS, MODEL, RUNS, RL = (f"{PACKAGE}.{name}" for name in ("ops", "model", "runs", "rl"))
WEB = ("fastapi", "pydantic", "starlette", "uvicorn")
DOCUMENTS = ("bs4", "html_to_markdown", "mammoth", "markdown_it", "pptx", "pypdfium2", "yaml")
PACKAGES = {
    "agent": {TYPES, RANGES, PYTHON_FILES, "json_repair", "nltk", "pyrsistent", "rouge_score"},
    "data": {
        *(TYPES, JSONL, RANGES, ANALYZER, CANONICAL, *DOCUMENTS),
        *("numpy", "pyarrow", "sentencex", "tensorflow_datasets"),
    },
    "http": {RANGES, "httpx2", *WEB},
    "retrieval": {
        *(HTTP, TYPES, JSONL, RANGES, ANALYZER, CANONICAL),
        *("numpy", "pyarrow", "scann", "bm25s", "filelock", *WEB),
    },
    "ops": {"numpy", "jax"},
    # The only package that imports flax.
    "model": {
        OPS,
        RANGES,
        "numpy",
        "jax",
        "flax",
        "safetensors",
        "huggingface_hub",
        "transformers",
        "tokenizers",
        "gguf",
    },
    "sampling": {OPS, MODEL, RANGES, "numpy", "jax"},
    "training": {OPS, MODEL, RANGES, "numpy", "jax", "optax", "orbax", "tensorstore"},
    "encoders": {TYPES, OPS, MODEL, RETRIEVAL, "numpy", "jax", "tokenizers"},
    "logs": {TYPES, JSONL, "numpy", "tensorboardX", "wandb", "rich"},
    "report": {AGENT, LOGS, TYPES, JSONL, "numpy", "scipy", "matplotlib", "rich"},
    "hosts": {CONFIG, MODEL, "numpy", "jax"},
}
LIBRARIES = {f"{PACKAGE}.{name}" for name in PACKAGES} | {CONFIG, TOKENIZER, CHAT_TEMPLATE, *SHARED, "numpy", "jax"}
# Each of these packages may import the preceding ones.
PACKAGES["runs"] = LIBRARIES | {"fsspec", "huggingface_hub"}
PACKAGES["rl"] = LIBRARIES | {RUNS, "mcp", *WEB}
PACKAGES["sft"] = LIBRARIES | {RUNS, RL}
PACKAGES["questions"] = LIBRARIES | {RUNS, RL}
PACKAGES["planning"] = LIBRARIES | {RUNS}
PACKAGES["device_check"] = LIBRARIES | {f"{PACKAGE}.planning"}
PACKAGES["serving"] = LIBRARIES | {RUNS, RL, "fastapi", "pydantic", "starlette", "mcp"}
# Settings import neither JAX nor a package that opens or runs anything.
SETTINGS = {f"{PACKAGE}.{name}.config" for name in (*PACKAGES, "agent.memalpha")}
MODULES = {
    **{name: set() for name in ("__init__", *NAMES)},
    "types": {"numpy"},
    "ranges": {"annotated_types"},
    "canonical": {TYPES},
    "tokenizer": {AGENT, MODEL, TYPES, "numpy", "tokenizers"},
    "chat_template": {MODEL, TOKENIZER, "tokenizers"},
    # Every command imports these two before JAX; a test below checks that they do not import JAX.
    "config": {AGENT, *SETTINGS, JSONL, RANGES, PYTHON_FILES, "annotated_types"},
    "checks": {AGENT, CONFIG, *SETTINGS, f"{PACKAGE}.data.benchmarks", RANGES},
}
OUTSIDE = {
    "configs": {PACKAGE},
    # main.py imports the module of the chosen command.
    "launch": {PACKAGE, "numpy", "jax", "rich", "tyro", "uvicorn", "filelock", "a computed name"},
}


def modules(*folders):
    """Every Python file in these folders, as paths relative to the root of the repository."""
    return sorted(path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(source, module):
    """Absolute names of all imports in `source`; `from a import b` gives `a.b`, because b may be a module."""
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


def forbidden_imports(path, source):
    """The imports of one module that the table does not allow."""
    module = ".".join(path.with_suffix("").parts)
    top, second = (*path.with_suffix("").parts, "")[:2]
    if top != PACKAGE:
        allowed = OUTSIDE[top]
    elif len(path.parts) == 2:
        allowed = MODULES[second]
    else:
        allowed = PACKAGES[second] | {f"{PACKAGE}.{second}"}
    return {
        name
        for name in imports(source, module)
        if name.split(".")[0] not in sys.stdlib_module_names
        and not any(name == prefix or name.startswith(prefix + ".") for prefix in allowed)
    }


def test_every_module_imports_only_what_the_table_allows():
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path in modules(PACKAGE, "configs", "launch")}
    forbidden = {str(path): forbidden_imports(path, source) for path, source in sources.items()}
    assert {path: names for path, names in forbidden.items() if names} == {}


def test_the_table_names_every_package():
    folders = {path.name for path in (ROOT / PACKAGE).iterdir() if any(path.glob("*.py"))}
    assert folders == set(PACKAGES)


@pytest.mark.parametrize(
    ("path", "source", "violations"),
    [
        ("agent/run.py", "import json\nfrom memsearcher_jax.types import Generate", set()),
        ("agent/run.py", "def late():\n    import numpy as np", {"numpy"}),
        ("agent/run.py", "from ..rl import tokenizer", {f"{PACKAGE}.rl.tokenizer"}),
        ("agent/run.py", "if TYPE_CHECKING:\n    from jax import Array", {"jax.Array"}),
        ("agent/run.py", "import importlib\nimportlib.import_module('jax')", {"jax"}),
        ("agent/run.py", "__import__(name)", {"a computed name"}),
        ("logs/metrics.py", "from memsearcher_jax.agent import reward", {f"{PACKAGE}.agent.reward"}),
        ("report/plots.py", "from memsearcher_jax.types_of_mine import x", {f"{PACKAGE}.types_of_mine.x"}),
        ("rl/loop.py", "import launch.cli, cli", {"launch.cli", "cli"}),
        ("config.py", "import jax", {"jax"}),
    ],
)
def test_the_import_check_finds_violations(path, source, violations):
    assert forbidden_imports(Path(PACKAGE, path), source) == violations


def test_init_files_are_empty():
    assert not [path for path in (ROOT / PACKAGE).rglob("__init__.py") if path.read_bytes()]


@pytest.mark.parametrize("path", ["agent", "logs", "report", "config.py", "checks.py"])
def test_importing_does_not_import_jax(path):
    paths = [Path(PACKAGE, path)] if path.endswith(".py") else modules(f"{PACKAGE}/{path}")
    names = [".".join(path.with_suffix("").parts) for path in paths]
    program = f"import sys, {', '.join(names)}\nprint(sorted(name for name in sys.modules if name.startswith('jax')))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
