"""Python files of a user: presets, agents, rewards and tools. Only files that a command line names are executed."""

from __future__ import annotations

import re
import sys
import traceback
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

_PREFIX = "memsearcher_jax_file "  # before the path, in the name of a module


def load_named(file: str | Path, setting: str, *names: str) -> Any:
    """What a file defines under the first of `names` that it has, or under its own name (my_agent of my-agent.py).

    Raises ValueError or OSError in one line with the setting, the file and, for an error in it, the line.
    """
    path = Path(file).absolute()
    module = load(path, setting)
    candidates = (*names, re.sub(r"^(?=\d)|\W", "_", path.stem))
    for name in candidates:
        if hasattr(module, name):
            return getattr(module, name)
    raise ValueError(f"{setting} {path}: defines no {' or '.join(candidates)}")


def load(file: str | Path, setting: str) -> ModuleType:
    """The module of a file, executed once for each content. Raises like `load_named`."""
    path = Path(file).absolute()
    if not path.is_file():
        raise FileNotFoundError(f"{setting} {file}: no such file")
    try:
        return _execute(str(path), path.read_bytes())
    except (Exception, SystemExit) as error:
        raise ValueError(f"{setting} {path}: {described(error)}") from error


@lru_cache(maxsize=64)
def _execute(path: str, content: bytes) -> ModuleType:
    module = ModuleType(_PREFIX + path)
    module.__file__ = path
    module.__package__ = ""  # no package, which `from .` would import from
    sys.modules[module.__name__] = module  # dataclasses look their module up
    # What was read: a hash of it is of what runs. Without this file's own future annotations.
    exec(compile(content, path, "exec", dont_inherit=True), vars(module))
    return module


def described(error: BaseException) -> str:
    """The error in one line, with the last line of a user's file that it passed; a SyntaxError names its own."""
    return " ".join(f"{type(error).__name__}: {error}".split()) + own_line(error)


def own_line(error: BaseException) -> str:
    """The last line of a user's file that the error passed, with a space before it; "" for none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _PREFIX + frame.filename in sys.modules:
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""
