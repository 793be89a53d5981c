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
    place = next((index for index, word in enumerate(words) if word in ("--help", "-h")), None)
    if place is None:
        return
    settings = {one.name: getattr(flags.run, one.name) for one in dataclasses.fields(flags.run)}
    sections = [name for name, value in settings.items() if dataclasses.is_dataclass(value)]
    section = next((word for word in words[place + 1 : place + 2] if not word.startswith("-")), "")
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


def _page(value: Any, source: Any = None) -> type:
    """A class with the fields of the dataclass `value`, without `run`, and its values as defaults.

    The help text shows the values that are set, or all of them as those of `source`.
    """
    kind, fields = type(value), []
    docs, hints = _paragraphs(kind), typing.get_type_hints(kind, include_extras=True)
    for name in (one.name for one in dataclasses.fields(kind) if one.name != "run"):
        current = getattr(value, name)
        if dataclasses.is_dataclass(current):
            nested = _page(current, source)
            fields.append((name, nested, dataclasses.field(default_factory=nested)))
            continue
        shown = source or current not in (None, "", False)
        label = (lambda text: f"({source or 'default'}: {text})") if shown else ""
        hint = tyro.conf.arg(help=docs.get(name, ""), help_behavior_hint=label)
        default = dataclasses.field(default_factory=lambda current=current: current)
        fields.append((name, Annotated[hints[name], hint], default))
    return dataclasses.make_dataclass(
        kind.__name__, fields, namespace={"__doc__": " ".join((kind.__doc__ or "").split())}
    )


def _paragraphs(kind: type) -> dict[str, str]:
    """The docstring below each field of a dataclass, in one line."""
    docs = {}
    for base in filter(dataclasses.is_dataclass, kind.__mro__):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body  # type: ignore[arg-type]
        for one, below in itertools.pairwise(definition.body):  # type: ignore[attr-defined]
            if isinstance(one, ast.AnnAssign) and isinstance(below, ast.Expr):
                docs.setdefault(one.target.id, " ".join(below.value.value.split()))  # type: ignore[attr-defined]
    return docs
