"""Mem-alpha's memory is a value: operations return new ones, ids never collide, sizes add up."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.agent.memalpha.memory import CallResult, ErrorKind, Memory, Status, Store, as_text
from memsearcher_jax.agent.memalpha.tools import DELETE, INSERT, SEARCH, UPDATE, Call, parse_arguments, run_call
from tests.agent.conftest import RecordedCounter

ALL_TOOLS = (INSERT, UPDATE, DELETE, SEARCH)
SEMANTIC, EPISODIC, CORE = Store.SEMANTIC, Store.EPISODIC, Store.CORE


COUNTER = RecordedCounter()


def test_the_core_can_be_replaced_and_emptied_but_not_inserted():
    memory, result = Memory().update(CORE, "v one", "any id", COUNTER)
    assert (memory.core, memory.core_tokens, result) == ("v one", 2, CallResult(Status.OK))
    assert memory.insert(CORE, "x", COUNTER)[1].error is ErrorKind.INVALID
    memory, result = memory.delete(CORE)
    assert (memory, result) == (Memory(), CallResult(Status.OK))
    assert memory.delete(CORE)[1].idle
    assert memory.update(CORE, None, None, COUNTER)[0].core == ""
    with pytest.raises(ValueError, match="core memory has no items"):
        memory.items(CORE)


def test_a_core_over_its_budget_is_cut_at_a_word():
    notice = " [content exceeds 20 tokens, truncated]"  # 8 tokens
    memory, result = Memory(core_budget=20).update(CORE, "w\n" * 25, None, COUNTER)
    assert memory.core == " ".join("w" * 12) + notice
    assert (memory.core_tokens, result.tokens_cut) == (20, 5)
    fits, result = Memory(core_budget=20).update(CORE, "w\n" * 20, None, COUNTER)
    assert (fits.core, result.tokens_cut) == ("w\n" * 20, 0)
    one_word, _ = Memory(core_budget=20).update(CORE, "." * 21, None, COUNTER)
    assert one_word.core == notice
    assert Memory(core_budget=3).update(CORE, "w " * 9, None, COUNTER)[0].core_tokens == 3, "less than the notice"


contents = st.sampled_from(["a", "b b", "", "c, d", "long " * 30, 7, None, ["x", "y"]])
ids = st.sampled_from(["0000", "0001", "0002", "000a", "zz", None, 1])
operations = st.lists(
    st.tuples(st.sampled_from(["insert", "update", "delete"]), st.sampled_from(Store), contents, ids), max_size=25
)


def run(memory: Memory, operation) -> tuple[Memory, CallResult]:
    name, store, content, item_id = operation
    if name == "insert":
        return memory.insert(store, content, COUNTER)
    if name == "update":
        return memory.update(store, content, item_id, COUNTER)
    return memory.delete(store, item_id)


@given(operations)
def test_invariants_of_any_sequence_of_operations(steps):
    memory, issued = Memory(core_budget=20), []
    for step in steps:
        before = repr(memory)
        after, result = run(memory, step)
        assert repr(memory) == before, "the old memory is as it was"
        assert (result.error is not None) == (result.status is Status.ERROR)
        if result.status is not Status.OK or result.idle:
            assert after == memory
        issued += [result.item.id] if step[0] == "insert" and result.item else []
        known = {item.id for store in (SEMANTIC, EPISODIC) for item in memory.items(store)}
        if step[0] == "update" and step[1] is not CORE and step[3] not in known:
            assert after is memory
        memory = after
    assert len(set(issued)) == len(issued), "no id is given out twice"
    held = (*memory.semantic, *memory.episodic)
    assert {item.id for item in held} <= set(issued)
    assert memory.tokens == sum(
        COUNTER.count(as_text(text)) for text in (memory.core, *(item.content for item in held))
    )
    assert memory.core_tokens <= memory.core_budget


def started(case: dict) -> Memory:
    off = {Store(name) for name in case["disabled"] or ()} | (set() if case["including_core"] else {CORE})
    return Memory(enabled=frozenset(Store) - off)


def shown(call: dict, memory: Memory, result: CallResult) -> dict:
    """The original's `result` of a call that was executed."""
    if result.status is Status.SKIPPED:
        return {"status": "skipped", "message": "Memory content already exists in the memory pool, insertion skipped."}
    if call["name"] == INSERT:
        return {"status": "ok", "new_memory": {result.item.id: result.item.content}}
    if call["name"] == UPDATE:
        item = result.item
        return {"status": "ok", "updated_memory": {item.id: item.content} if item else memory.core}
    return {"status": "ok"}


def test_recorded_operations(recorded):
    """Every recorded case but one: two items under one id cannot exist here."""
    for case in recorded("memalpha/memory_ops.jsonl"):
        memory, steps = started(case["input"]), case["output"]["steps"]
        if case["tag"].startswith("id_collision"):
            continue
        for number, (call, step) in enumerate(zip(case["input"]["calls"], steps, strict=True)):
            where = (case["id"], case["tag"], number)
            written = call["arguments"] if isinstance(call["arguments"], str) else json.dumps(call["arguments"])
            memory, result = run_call(memory, Call(call["name"], written), COUNTER, offered=ALL_TOOLS)
            assert result.status.value == step["status"], where
            assert (result.status is not Status.ERROR) == step["executed"], where
            if not case["tag"].startswith("content_spoofs"):  # their text tests are fooled, ours are none
                assert (result.status is Status.OK) == step["counted_success"], where
            arguments = parse_arguments(written)
            if step["parsed_arguments"] is None:
                assert result.error is ErrorKind.UNREADABLE, where
            else:
                assert arguments == step["parsed_arguments"], where
            if result.status is Status.ERROR:
                assert result.error.value == step["error_kind"], where
            elif call["name"] == SEARCH:
                ours = [[{item.id: item.content}, pytest.approx(score, abs=1e-9)] for item, score in result.hits]
                assert step["result"]["results"] == ours, where
            else:
                assert shown(call, memory, result) == step["result"], where
        final = case["output"]["final"]
        assert (memory.core if CORE in memory.enabled else None) == final["core"], case["id"]
        for store in (SEMANTIC, EPISODIC):
            assert [[item.id, item.content] for item in memory.items(store)] == final[store.value], case["id"]
        assert memory.tokens == final["total_length"], case["id"]
