"""Mem-alpha's tool calls: found in a reply, repaired, read into operations, run on a memory."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.agent.memalpha import tools
from memsearcher_jax.agent.memalpha.memory import CallResult, ErrorKind, Memory, Status, Store
from memsearcher_jax.agent.memalpha.tools import Call

FUNCTION, ARGS = "✿FUNCTION✿", "✿ARGS✿"


@pytest.mark.parametrize("hole", [" ", "\n", f"{FUNCTION}:", f"{FUNCTION}: a {ARGS}:", f" {ARGS}:", "✿"])
def test_finding_calls_takes_bounded_time(hole):
    started = time.process_time()
    tools.tool_calls(f"{FUNCTION}:" + hole * 20_000)
    assert time.process_time() - started < 5.0


@pytest.mark.parametrize("bit", ["a,", "a: ", 'say "x", ', "\\n", "it's "])
def test_repairing_arguments_takes_bounded_time(bit):
    started = time.process_time()
    read = tools.parse_arguments('{"content": "' + bit * 4_000)
    assert time.process_time() - started < 5.0
    assert "content" in read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": "b"', {"a": "b"}),
        ("{'a': 'b'}", {"a": "b"}),
        ('{"a": b c, "d": 1,}', {"a": "b c", "d": 1}),
        ('{"a": "cut sh', {"a": "cut sh"}),
        ('```json\n{"a": 1}\n```', {"a": 1}),
        ('{"a": "東京"}', {"a": "東京"}),
        ('{"a": "\\ud800\\ud83d\\ude00"}', {"a": "?😀"}),
        ("[1, 2", [1, 2]),
        # What a reply that was cut off leaves; older releases of json-repair take `said` for a key.
        ('{"a": "At 10:30, Ann said: \\"hi', {"a": 'At 10:30, Ann said: "hi'}),
    ],
)
def test_arguments_are_repaired(text, value):
    assert tools.parse_arguments(text) == value


@pytest.mark.parametrize("text", ["", "  ", "none of it", "[" * 100_000, '{"a": ' * 50_000, "1" * 5_000])
def test_arguments_that_cannot_be_repaired_are_an_error(text):
    assert tools.parse_arguments(text).error is ErrorKind.UNREADABLE


def test_search_is_not_offered_by_default(token_counter):
    call = Call("search_memory", '{"memory_type": "semantic_memory", "query": "x"}')
    _, result = tools.run_call(Memory(), call, token_counter)
    assert result == CallResult.failed(ErrorKind.MISSING, "there is no tool 'search_memory'")
    off = Memory(enabled=frozenset({Store.CORE}))
    assert tools.run_call(off, call, token_counter, offered=("search_memory",))[1].error is ErrorKind.INVALID


@pytest.mark.parametrize("item_id", [["0000"], {"0000": 1}])
@pytest.mark.parametrize("name", [tools.UPDATE, tools.DELETE])
def test_an_id_that_is_a_list_or_an_object_is_an_error(token_counter, name, item_id):
    memory, _ = Memory().insert(Store.SEMANTIC, "x", token_counter)
    arguments = {"memory_type": "semantic_memory", "new_content": "y", "memory_id": item_id}
    after, result = tools.run_call(memory, Call(name, json.dumps(arguments)), token_counter)
    assert (after, result.error) == (memory, ErrorKind.UNEXPECTED)


bits = st.sampled_from(
    [
        *(f"{FUNCTION}:", f"{ARGS}:", "✿RESULT✿:", "✿RETURN✿", "✿", "✿FUNC", " ", "\n", "\r\n", "```", "{", "}"),
        *('"', "'", "\\", "\\u", "d800", ":", ",", "[", "]", '"memory_type"', '"semantic_memory"', '"content"', "0000"),
        *("//", "/*", "#", "null", "true", "-", "1e", "<think>", "</think>", "</done>", "é", *tools.OFFERED),
    ]
)


@given(st.lists(bits, max_size=40).map("".join))
def test_no_reply_raises(token_counter, reply):
    calls = tools.tool_calls(tools.truncate_reply(reply))
    memory, results = tools.run_calls(Memory(), calls, token_counter, offered=(*tools.OFFERED, tools.SEARCH))
    assert len(results) == len(calls)
    assert len(memory.semantic) == sum(1 for result in results if result.item and result.status is Status.OK)
    assert all("✿" not in call.arguments for call in calls)


@given(st.lists(bits, max_size=40).map("".join) | st.text(max_size=60))
def test_any_arguments_are_json_or_an_error(text):
    value = tools.parse_arguments(text)
    # Compared as text: NaN, which Python's JSON allows, is not equal to itself.
    assert isinstance(value, CallResult) or json.dumps(json.loads(json.dumps(value))) == json.dumps(value)


def test_recorded_parses(recorded):
    for case in recorded("memalpha/tool_parse.jsonl"):
        theirs = case["output"]
        kept = tools.truncate_reply(case["input"]["model_text"])
        assert kept == theirs["trained_text"], case["id"]
        assert [list(call) for call in tools.tool_calls(kept)] == theirs["calls"], case["id"]
