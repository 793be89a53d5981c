"""JSON Lines, plain or gzip, with errors that name the file and the line.

Standard library only, so that every room may read its files with it.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class MalformedRow(ValueError):
    """One line of a file does not hold what it must; the message is one line that starts with `file:line`."""


def numbered_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield `("file:line", bytes)` of every line that is not blank.

    A name that ends in `.gz` is decompressed on the way.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is a folder, or its compressed data is damaged.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if path.is_dir():
        raise ValueError(f"{path}: is a folder, a .jsonl or .jsonl.gz file is needed")
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
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise MalformedRow(f"{where}: not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise MalformedRow(f"{where}: not JSON ({error.msg}, column {error.colno})") from error
    except RecursionError as error:
        raise MalformedRow(f"{where}: not JSON that can be read (nested too deeply)") from error
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


def id_field(where: str, row: dict[str, Any]) -> str:
    """Return the field `id`. Published files hold text or whole numbers there: a number becomes its decimal text."""
    value = row.get("id")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return text_field(where, row, "id")
