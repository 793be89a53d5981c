"""Python files of a user: presets, agents, rewards and tools. Only files that a command line names are executed.

Such a file may import the files beside it, as a script may: `import helpers` executes helpers.py of its folder.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
import traceback
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

_PREFIX = "memsearcher_jax_file "  # before the path, in the name of a module
_loading: dict[str, ModuleType] = {}  # by path, for files that import each other


class CodeName(NamedTuple):
    """What a setting names: FILE.py, or FILE.py:NAME for one thing that it defines. No file for other values."""

    file: str
    member: str = ""

    @classmethod
    def of(cls, value: str) -> CodeName:
        match = re.fullmatch(r"(?s)(.+\.py)(?::([^\W\d]\w*))?", value)
        return cls(match[1], match[2] or "") if match else cls("")

    def __str__(self) -> str:
        return f"{self.file}:{self.member}" if self.member else self.file


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
        return _module(path)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{setting} {path}: {described(error)}") from error


def imported_files(file: str | Path) -> list[Path]:
    """The file and those beside it that it imports, also through others: what a hash of its code is of."""
    return list(_sources(Path(file).absolute()))


def _sources(path: Path) -> dict[Path, bytes]:
    """The content of the file and of those beside it that it imports, also within functions."""
    contents: dict[Path, bytes] = {}
    waiting = [path]
    while waiting:
        source = waiting.pop()
        if source in contents:
            continue
        contents[source] = source.read_bytes()
        try:
            statements = list(ast.walk(ast.parse(contents[source])))
        except (SyntaxError, ValueError):  # found when it is executed
            continue
        for statement in statements:
            names: list[str] = []
            if isinstance(statement, ast.Import):
                names = [alias.name for alias in statement.names]
            elif isinstance(statement, ast.ImportFrom) and statement.level == 0:
                names = [statement.module or ""]
            beside = [_beside(source.parent, name) for name in names]
            waiting += [file for file in beside if file is not None]
    return contents


def _beside(folder: Path, name: str) -> Path | None:
    """The file that `import name` executes in a file of this folder; None: it is imported as anywhere else."""
    file = folder / f"{name}.py"
    is_elsewhere = not name.isidentifier() or name in sys.stdlib_module_names or name == __package__
    return None if is_elsewhere or not file.is_file() else file


def _module(path: Path) -> ModuleType:
    if str(path) in _loading:
        return _loading[str(path)]
    return _execute(str(path), tuple(_sources(path).items()))


@lru_cache(maxsize=64)
def _execute(path: str, sources: tuple[tuple[Path, bytes], ...]) -> ModuleType:
    """Executes the first of the sources; those that it imports decide whether it is executed again."""
    module = ModuleType(_PREFIX + path)
    module.__file__ = path
    module.__package__ = ""  # no package, which `from .` would import from
    # Not by sys.path: files of two folders may have one name, and none replaces a library elsewhere in the process.
    vars(module)["__builtins__"] = vars(builtins) | {"__import__": partial(_import, Path(path).parent)}
    sys.modules[module.__name__] = module  # dataclasses look their module up
    _loading[path] = module
    try:
        # What was read: a hash of it is of what runs. Without this file's own future annotations.
        exec(compile(sources[0][1], path, "exec", dont_inherit=True), vars(module))
    finally:
        del _loading[path]
    return module


def _import(folder: Path, name: str, *options: Any, **keywords: Any) -> Any:
    """`__import__` of the files in a folder."""
    file = _beside(folder, name)
    return _module(file) if file else builtins.__import__(name, *options, **keywords)


def described(error: BaseException) -> str:
    """The error in one line, with the last line of a user's file that it passed; a SyntaxError names its own."""
    return " ".join(f"{type(error).__name__}: {error}".split()) + own_line(error)


def own_line(error: BaseException) -> str:
    """The last line of a user's file that the error passed, with a space before it; "" for none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _PREFIX + frame.filename in sys.modules:
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""
