"""The parsers agree with the recorded reference behaviour and accept any text at all."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memsearcher_jax.agent import protocol
from memsearcher_jax.types import Call, Query

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<memory>", "</memory>", "\\boxed{", "\\boxed ", "}", "{"]
JSON_BITS = ['"arguments"', '"query"', '"top_n"', ":", ",", "{", "}", "[", "]", "1", "null", "NaN", '"\\ud800"']
tagged = st.lists(st.sampled_from([*TAGS, *JSON_BITS, "a", " ", "\n", "$"]) | st.text(max_size=3)).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def parse(body: str) -> Query | str:
    return protocol.parse_call(body, default_top_n=5, max_top_n=20)


def call(**arguments: object) -> str:
    return json.dumps({"name": "wikipedia_search", "arguments": arguments})


def test_recorded_extractions(recorded):
    cases = recorded("memsearcher/protocol.jsonl")
    assert cases
    for case in cases:
        assert protocol.tool_calls(case["output_str"]) == case["extract_tool_calls"], case["id"]
        assert protocol.memory(case["output_str"]) == case["extract_memory"], case["id"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"<think> \boxed{a} </think> so \boxed{b}", "b"),
        (r"<think> \boxed{a} </think> no more", None),
        (r"\boxed{a} <think> never closed \boxed{b}", "a"),
        (r"<think> never closed \boxed{b}", None),
        (r"<think> x </think> \boxed{a} <think> \boxed{b} </think>", "a"),
    ],
)
def test_a_box_counts_outside_thoughts_only(text, answer):
    assert protocol.boxed_answer(text) == answer


@pytest.mark.parametrize(
    ("body", "parsed"),
    [
        (call(query="q"), Query("q", 5)),
        (call(query="q", top_n=2), Query("q", 2)),
        (call(query="q", top_n=None), Query("q", 5)),
        (call(query="q", top_n=10**9), Query("q", 20)),
        ('{"arguments": {"query": "no name"}}', Query("no name", 5)),
        ('{"arguments": {"query": "half \\ud800 pair"}}', Query("half ? pair", 5)),
        ("nope", "Parse tool call failed"),
        ('{"name": "wikipedia_search"}', "Parse tool call failed"),
        ("[" * 100_000, "Parse tool call failed"),
        ("1" * 10_000, "Parse tool call failed"),
        ('{"arguments": "q"}', "Parse query failed"),
        (call(top_n=2), "invalid query"),
        (call(query=""), "invalid query"),
        (call(query=" \n"), "invalid query"),
        (call(query=5), "invalid query"),
        (call(query="q", top_n=0), "invalid top_n"),
        (call(query="q", top_n="3"), "invalid top_n"),
        (call(query="q", top_n=True), "invalid top_n"),
    ],
)
def test_parse_call(body, parsed):
    assert parse(body) == parsed


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ('{"x": "half \\ud800"}', Call("add", {"x": "half ?"})),
        ('{"x": NaN}', "Parse tool call failed"),  # no trajectory file may hold it
        ('{"x": [-1e999]}', "Parse tool call failed"),
    ],
)
def test_arguments_of_the_runs_own_tools_are_json(arguments, parsed):
    body = f'{{"name": "add", "arguments": {arguments}}}'
    assert protocol.parse_call(body, default_top_n=5, max_top_n=20, tools=("add",)) == parsed


@given(tagged)
@example("<tool_call>" * 5_000)
@example("<think>" * 5_000 + "</think>")
def test_parsers_accept_any_text(text):
    for body in protocol.tool_calls(text):
        assert body == body.strip() and body in text
        parse(body)
    remembered = protocol.memory(text)
    assert remembered == remembered.strip() and remembered in text
    answer = protocol.boxed_answer(text)
    assert answer is None or answer in protocol.without_thoughts(text)
    parse(text)


@given(st.dictionaries(st.sampled_from(["query", "top_n", "other"]), json_values))
def test_arguments_give_a_bounded_query_or_one_line(arguments):
    parsed = parse(json.dumps({"arguments": arguments}))
    if isinstance(parsed, Query):
        assert 1 <= parsed.top_n <= 20
        assert parsed.text.strip() and parsed.text.encode("utf-8")
    else:
        assert parsed in {"invalid query", "invalid top_n"}
