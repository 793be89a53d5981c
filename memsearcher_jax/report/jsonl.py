"""Strict JSON lines and safe replacement of files: what every file format of this room shares.

JSON has no NaN and no infinities, and many readers refuse Python's unquoted spelling of them. They are written as the
strings "NaN", "Infinity" and "-Infinity", which `float` reads back, so that a diverged step stays visible.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

NON_FINITE = ("NaN", "Infinity", "-Infinity")


def encode_float(value: float) -> float | str:
    """`value`, or its name in `NON_FINITE`."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def decode_float(value: Any) -> float:
    """The inverse of `encode_float`; anything else raises ValueError."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if value in NON_FINITE:
        return float(value)
    raise ValueError(f"{value!r} is not a number")


def encode_line(record: dict[str, Any]) -> str:
    """One line of strict JSON, ending in a newline; a value that JSON cannot hold raises TypeError or ValueError.

    Text outside ASCII is escaped: a model may write half a surrogate pair, which no UTF-8 file can hold.
    """
    return json.dumps(record, allow_nan=False) + "\n"


def decode_line(line: str, where: str) -> dict[str, Any]:
    """The object on one line; `where` names the line in the error."""
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except ValueError as error:
        raise ValueError(f"{where}: not a line of strict JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected a JSON object, found {type(record).__name__}")
    return record


def _refuse_constant(name: str) -> float:
    raise ValueError(f"unquoted {name}")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file written beside `path` that takes its place when the block ends; after an error `path` is as it was."""
    beside = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(beside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    os.replace(beside, path)
