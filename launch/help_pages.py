"""--help of the commands that have settings: one page for the flags of the command, one for each section of settings.

tyro prints the pages. It keeps the line breaks of docstrings, so they are given to it as single paragraphs.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from collections.abc import Sequence
from typing import Annotated, Any

import tyro


def print_if_asked(flags: Any, words: Sequence[str]) -> None:
    """Prints the page that --help or --help SECTION among the words asks for, and exits.

    `flags`: a dataclass with the settings in its field `run`. Raises ValueError if there is no such section.
    """
    asked = _asked_section(words)
    if asked is None:
        return
    settings = {field.name: getattr(flags.run, field.name) for field in dataclasses.fields(flags.run)}
    sections = [name for name, value in settings.items() if dataclasses.is_dataclass(value)]
    section = asked
    if section:
        if section not in sections:
            raise ValueError(f"--help {section}: the sections are {', '.join(sections)}")
        source = flags.config or flags.checkpoint or "nano"
        nested = _page(settings[section], source)
        page = dataclasses.make_dataclass("Settings", [(section, nested, dataclasses.field(default_factory=nested))])
        text = f"The settings of {section}, with their values in {source}."
    else:
        page = _page(flags)
        text = (
            f"{type(flags).__doc__}\n\nSettings are flags, too: --SECTION.NAME VALUE. --help SECTION lists those of "
            f"{', '.join(sections)}."
        )
    markers = (tyro.conf.FlagConversionOff,) if section else (tyro.conf.FlagCreatePairsOff,)
    tyro.cli(page, args=["--help"], use_underscores=True, config=markers, description=text)


def _asked_section(words: Sequence[str]) -> str | None:
    """The section after the first --help among the words, "" for the flags of the command; None without --help."""
    for index, word in enumerate(words):
        if word in ("--help", "-h"):
            following = words[index + 1] if index + 1 < len(words) else ""
            return "" if following.startswith("-") else following
    return None


def _page(value: Any, source: Any = None) -> type:
    """A class with the fields of the dataclass `value`, without `run`, and its values as defaults.

    The help text shows the values that are set, or all of them as those of `source`.
    """
    kind = type(value)
    docs = _paragraphs(kind)
    hints = typing.get_type_hints(kind, include_extras=True)
    page_fields = []
    for field in dataclasses.fields(kind):
        name = field.name
        if name == "run":
            continue
        current = getattr(value, name)
        if dataclasses.is_dataclass(current):
            nested = _page(current, source)
            page_fields.append((name, nested, dataclasses.field(default_factory=nested)))
            continue
        shown = source or current not in (None, "", False)
        label = (lambda text: f"({source or 'default'}: {text})") if shown else ""
        hint = tyro.conf.arg(help=docs.get(name, ""), help_behavior_hint=label)
        default = dataclasses.field(default_factory=lambda current=current: current)
        page_fields.append((name, Annotated[hints[name], hint], default))
    summary = " ".join((kind.__doc__ or "").split())
    return dataclasses.make_dataclass(kind.__name__, page_fields, namespace={"__doc__": summary})


def _paragraphs(kind: type) -> dict[str, str]:
    """The docstring below each field of a dataclass, in one line."""
    docs = {}
    for base in filter(dataclasses.is_dataclass, kind.__mro__):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body  # type: ignore[arg-type]
        for field, below in itertools.pairwise(definition.body):  # type: ignore[attr-defined]
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                docs.setdefault(field.target.id, " ".join(below.value.value.split()))  # type: ignore[attr-defined]
    return docs
