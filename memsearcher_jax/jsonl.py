"""JSON Lines, plain or gzip, with errors that name the file and the line.

Standard library only, so that every package may use it. JSON has no NaN and no infinities, and many readers refuse
Python's unquoted spelling of them: they are written as the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NON_FINITE = ("NaN", "Infinity", "-Infinity")


class MalformedRow(ValueError):
    """One line of a file does not hold what it must; the message is one line that starts with `file:line`."""


def numbered_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield `("file:line", bytes)` of every line that is not blank; a file that ends in `.gz` is decompressed.

    Raises FileNotFoundError or ValueError, in one line, for no file, a folder or a pipe, or damaged compressed data.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if not path.is_file():
        raise ValueError(f"{path}: is a folder or a pipe, a .jsonl or .jsonl.gz file is needed")
    number = 0
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    yield f"{path}:{number}", line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: compressed data is damaged after line {number} ({error})") from error


def parse_object(where: str, line: bytes) -> dict[str, Any]:
    """Return the JSON object that `line` holds, or raise `MalformedRow`."""
    try:
        row = json.loads(line.rstrip())  # an error at the end is then in the column after the last character
    except UnicodeDecodeError as error:
        raise MalformedRow(f"{where}: not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise MalformedRow(f"{where}: not JSON ({error.msg}, column {error.colno})") from error
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
        raise MalformedRow(f"{where}: not JSON that can be read ({error})") from error
    if not isinstance(row, dict):
        raise MalformedRow(f"{where}: a JSON object is needed, found {type(row).__name__}")
    return row


def text_field(where: str, row: dict[str, Any], name: str) -> str:
    """Return the field `name`: a string that is neither blank nor impossible to write as UTF-8."""
    if name not in row:
        raise MalformedRow(f'{where}: no field "{name}"')
    return checked_text(where, name, row[name])


def checked_text(where: str, name: str, value: Any) -> str:
    """Return `value` if it is text with content; a lone surrogate (JSON allows it) is not text."""
    if not isinstance(value, str):
        raise MalformedRow(f'{where}: field "{name}" must be text, found {type(value).__name__}')
    if not value.strip():
        raise MalformedRow(f'{where}: field "{name}" is empty')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise MalformedRow(f'{where}: field "{name}" holds a lone surrogate (character {error.start})') from error
    return value


def id_field(where: str, row: dict[str, Any], name: str = "id") -> str:
    """Return the field `name`. Published files hold text or whole numbers there: a number becomes its decimal text."""
    value = row.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return text_field(where, row, name)


def encode_line(record: dict[str, Any]) -> str:
    """Return `record` as one line of strict JSON; a value that JSON cannot represent raises TypeError or ValueError.

    Non-ASCII text is escaped, because a model may write a lone surrogate, which UTF-8 cannot represent.
    """
    return json.dumps(record, allow_nan=False) + "\n"


def encode_float(value: float) -> float | str:
    """Return `value`, or its name in `NON_FINITE`, as `json` spells it."""
    return value if math.isfinite(value) else json.dumps(float(value))


def encode_floats(value: Any) -> Any:
    """`value` with `encode_float` applied to every float in its mappings and sequences."""
    if isinstance(value, Mapping):
        return {str(name): encode_floats(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [encode_floats(inner) for inner in value]
    return encode_float(value) if isinstance(value, float) else value


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """The values inside nested mappings by their dotted names, such as "agent.workflow"; an empty mapping has none."""
    if not isinstance(value, Mapping):
        return {name: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= flatten(inner, f"{name}.{key}" if name else str(key))
    return flat


def decode_float(value: Any) -> float:
    """Invert `encode_float`; any other value raises ValueError."""
    if value in NON_FINITE or (isinstance(value, int | float) and not isinstance(value, bool)):
        return float(value)
    raise ValueError(f"{value!r} is not a number")
