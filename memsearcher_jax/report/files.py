"""What the files of this room share: how numbers are spelt, and how a file is replaced.

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
    """One line of strict JSON with its newline; a value that JSON cannot hold raises TypeError or ValueError.

    Text outside ASCII is escaped: a model may write half a surrogate pair, which no UTF-8 file can hold.
    """
    return json.dumps(record, allow_nan=False) + "\n"


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
