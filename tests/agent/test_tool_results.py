"""A tool's result is JSON that any parser reads, whatever types a user's function returns."""

import json
import math
from collections import OrderedDict, deque
from datetime import date
from enum import Enum
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.agent.tool_functions import as_text


class Colour(Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"score": math.nan, "best": [math.inf, 0.5]}, '{"score": null, "best": [null, 0.5]}'),
        ({(1, 2): "a", None: "b", True: "c", Colour.RED: "d"}, '{"(1, 2)": "a", "null": "b", "true": "c", "red": "d"}'),
        (Colour.RED, '"red"'),
        (b"caf\xc3\xa9 \xff", '"café \\\\xff"'),
        ({"a": 1}.values(), "[1]"),
        ((number for number in range(2)), "[0, 1]"),
        (deque([OrderedDict(a=None)]), '[{"a": null}]'),
        (MappingProxyType({"day": date(2020, 1, 2)}), '{"day": "2020-01-02"}'),
    ],
)
def test_any_type_has_its_json(value, text):
    assert as_text(value) == text


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.dates()
VALUES = st.recursive(
    LEAVES, lambda values: st.lists(values) | st.dictionaries(LEAVES.filter(lambda key: key == key), values)
)


@given(VALUES.filter(lambda value: not isinstance(value, str)))
def test_every_result_is_strict_json(value):
    json.loads(as_text(value), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
