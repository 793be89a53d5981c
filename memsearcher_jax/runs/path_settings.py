"""The settings of a run that name files and folders. No JAX here."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from memsearcher_jax.agent.harness import is_file
from memsearcher_jax.agent.prompts import packaged
from memsearcher_jax.config import RunConfig, settings, with_settings
from memsearcher_jax.data.benchmarks import BENCHMARKS
from memsearcher_jax.python_files import CodeName
from memsearcher_jax.retrieval.config import HASHING
from memsearcher_jax.runs import hub
from memsearcher_jax.runs.run_dir import PACKAGED

CODE = ("agent.workflow", "agent.harness", "agent.tools", "reward.function")  # Python files, or names and addresses
COMMAND_PATH = re.compile(r"""(?:^|(?<=\s)|(?<=mcp:))~[^\s'"]*""")
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
    "sft.trajectories": (),
    "sft.held_out": (),
}
"""Other settings that name files or folders, with the values that are no paths: names of templates, of benchmarks or of
an encoder."""


def with_paths(config: RunConfig, change: Callable[[str], str]) -> RunConfig:
    """The config with `change` applied to every path in it, but not to repositories and packaged folders."""
    values = settings(config)
    return with_settings(config, {name: _changed(name, values[name], change) for name in (*CODE, *PATHS)})


def with_expanded_paths(config: RunConfig) -> RunConfig:
    """The config with `expanded` paths, also among the words of commands. Raises ValueError in one line."""
    config = with_paths(config, expanded)
    harness = config.agent.harness
    changes: dict[str, Any] = {
        "agent.harness": harness if is_python_file(harness) else _expanded_command(harness),
        "agent.tools": tuple(
            _expanded_command(tool) if tool.startswith("mcp:") else tool for tool in config.agent.tools
        ),
    }
    return with_settings(config, changes)


def with_stored_paths(config: RunConfig, stored: RunConfig) -> RunConfig:
    """The config with the absolute form of every path that `stored` has in this form.

    So a command that is repeated names the same files as before, also where they exist no longer.
    """
    given_values = settings(config)
    stored_values = settings(stored)
    changes = {name: _as_stored(given_values[name], stored_values[name]) for name in (*CODE, *PATHS)}
    return with_settings(config, changes)


def _as_stored(given: Any, stored: Any) -> Any:
    if isinstance(given, tuple):
        return tuple(_as_stored(member, stored) for member in given)
    absolute = str(Path(given).absolute())
    known = stored if isinstance(stored, tuple) else (stored,)
    return absolute if given and absolute in known else given


def expanded(path: str) -> str:
    """The path with a home directory in place of a leading ~ or ~USER, as a shell reads it.

    A shell does not expand it within quotes, after --flag= or in the arguments of a pod. Raises ValueError if there is
    no such user.
    """
    full = os.path.expanduser(path)
    if full.startswith("~"):
        user = path.partition("/")[0]
        raise ValueError(f"{path}: there is no user {user[1:]}; if a folder is named {user}, give its absolute path")
    return full


def _expanded_command(command: str) -> str:
    """The command of a harness or of an MCP server, with a home directory in place of ~ before a word.

    As a shell does, it leaves the name of an unknown user as it is.
    """

    def in_full(match: re.Match[str]) -> str:
        full = os.path.expanduser(match[0])
        return match[0] if full == match[0] else shlex.quote(full)

    return COMMAND_PATH.sub(in_full, command)


def is_python_file(value: str) -> bool:
    """Whether the value of a setting in CODE names a file, or what it defines, and not a command that ends with one."""
    file = CodeName.of(value).file
    return not value.startswith("mcp:") and is_file(os.path.expanduser(file))


def _changed(name: str, value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, tuple):
        return tuple(_changed(name, member, change) for member in value)
    if name in CODE:
        code = CodeName.of(value)
        return str(code._replace(file=change(code.file))) if is_python_file(value) else value
    is_name = value.startswith(PACKAGED) or value.partition(":")[0] in ("", *PATHS[name]) or hub.is_repository(value)
    return value if is_name else change(value)
