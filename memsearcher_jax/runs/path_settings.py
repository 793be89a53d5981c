"""The settings of a run that name files and folders. No JAX here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from memsearcher_jax.agent.harness import is_file
from memsearcher_jax.agent.prompts import packaged
from memsearcher_jax.config import RunConfig, settings, with_settings
from memsearcher_jax.data.benchmarks import BENCHMARKS
from memsearcher_jax.retrieval.config import HASHING
from memsearcher_jax.runs import hub
from memsearcher_jax.python_files import CodeName
from memsearcher_jax.runs.run_dir import PACKAGED

CODE = ("agent.workflow", "agent.harness", "agent.tools", "reward.function")  # Python files, or names and addresses
PATHS: dict[str, Iterable[str]] = {
    "agent.prompts": packaged(),
    "agent.replay": (),
    "data.train": BENCHMARKS,
    "data.test": BENCHMARKS,
    "data.root": (),
    "data.exclude": (),
    "model.path": (),
    "model.tokenizer": (),
    "model.adapter": (),
    "teacher.path": (),
    "retrieval.corpus": (),
    "retrieval.index": (),
    "retrieval.encoder": (HASHING,),
}
"""Other settings that name files or folders, with the values that are no paths: names of templates, of benchmarks or of
an encoder."""


def with_paths(config: RunConfig, change: Callable[[str], str]) -> RunConfig:
    """The config with `change` applied to every path in it, but not to repositories and packaged folders."""
    values = settings(config)
    return with_settings(config, {name: _changed(name, values[name], change) for name in (*CODE, *PATHS)})


def is_python_file(value: str) -> bool:
    """Whether the value of a setting in CODE names a file, and not a command that ends with one."""
    return not value.startswith("mcp:") and is_file(value)


def _changed(name: str, value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, tuple):
        return tuple(_changed(name, member, change) for member in value)
    if name in CODE:
        code = CodeName.of(value)
        return str(code._replace(file=change(code.file))) if is_python_file(value) else value
    is_name = value.startswith(PACKAGED) or value.partition(":")[0] in ("", *PATHS[name]) or hub.is_repository(value)
    return value if is_name else change(value)
