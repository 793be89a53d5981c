"""JSON values as dataclasses, by the types of their fields, and nothing else in their place.

Written here because msgspec refuses the names of non-finite numbers and ignores unknown fields of dataclasses, and
cattrs would need a hook for each of the types below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache, partial
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from memsearcher_jax.jsonl import decode_float

Decoder = Callable[[Any], Any]
ELEMENTS = {np.int32: int, np.float32: float, np.bool_: bool}
"""The types of arrays, and those of their entries in JSON."""
JSON_NAMES = {int: "whole number", bool: "flag", str: "text", list: "list", dict: "object"}


def decode(kind: Any, value: Any) -> Any:
    """A JSON value as `kind`: a dataclass, or the type of a field of one.

    Fields are int, bool (also 0 and 1), float (also a name of `jsonl.NON_FINITE`), str, Any, an enumeration, a
    dataclass, `tuple[X, ...]`, `dict[str, X]`, `X | None` and arrays of int32, float32 and bool.

    Raises TypeError or ValueError for a value of another type, a missing field or an unknown one; the message begins
    with the names of the fields that lead to it.
    """
    return _decoder(kind)(value)


@cache
def _decoder(kind: Any) -> Decoder:
    """The function that decodes values of a type."""
    if is_dataclass(kind):
        return partial(_decode_dataclass, kind, get_type_hints(kind))
    if kind is float:
        return decode_float
    if kind is bool:
        return _decode_flag
    if kind in (int, str):
        return partial(_checked, kind)
    if kind is Any:
        return _unchanged
    origin = get_origin(kind)
    if origin is UnionType:
        inner, none = get_args(kind)
        assert none is type(None), "a field of two types has no place in JSON that tells which"
        return partial(_decode_optional, _decoder(inner))
    if origin is tuple:
        return partial(_decode_tuple, _decoder(get_args(kind)[0]))
    if origin is np.ndarray:
        (dtype,) = get_args(get_args(kind)[1])
        return partial(_decode_array, _decoder(ELEMENTS[dtype]), dtype)
    if origin is dict:
        inner = get_args(kind)[1]
        return partial(_decode_dict, _decode_count if inner is int else _decoder(inner))
    return kind  # an enumeration, which raises ValueError for what is none of its values


def _decode_dataclass(kind: Any, hints: dict[str, Any], value: Any) -> Any:
    decoded: dict[str, Any] = {}
    for name, field_value in _checked(dict, value).items():
        if name not in hints:
            raise ValueError(f"unknown field {name!r}")
        try:
            decoded[name] = decode(hints[name], field_value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from error
    return kind(**decoded)


def _decode_optional(inner: Decoder, value: Any) -> Any:
    return None if value is None else inner(value)


def _decode_tuple(inner: Decoder, value: Any) -> tuple[Any, ...]:
    return tuple(map(inner, _checked(list, value)))


def _decode_array(inner: Decoder, dtype: Any, value: Any) -> np.ndarray:
    """Raises OverflowError for a whole number that the type does not hold."""
    return np.array(list(map(inner, _checked(list, value))), dtype)


def _decode_dict(inner: Decoder, value: Any) -> dict[str, Any]:
    return {name: inner(inner_value) for name, inner_value in _checked(dict, value).items()}


def _decode_flag(value: Any) -> bool:
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    return _checked(bool, value)


def _decode_count(value: Any) -> float:
    """A count, which an agent that is not ours may write as a fraction or a flag."""
    number = decode_float(int(value) if isinstance(value, bool) else value)
    return value if isinstance(value, int) else number


def _unchanged(value: Any) -> Any:
    return value


def _checked(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{value!r:.100} is no {JSON_NAMES[kind]}")
    return value
