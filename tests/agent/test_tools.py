"""Tool calls run once each, in order, and what they bring back fits the budget."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.agent import prompts
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.tool_functions import file_tools
from memsearcher_jax.agent.tools import fair_shares, run_tool_calls
from memsearcher_jax.types import Call, Passage, Query, Search, SearchResult, ToolResult, Turn


def call(query: str) -> str:
    return json.dumps({"name": "wikipedia_search", "arguments": {"query": query}})


def run(bodies, results, token_counter, **settings):
    """The `Search` that was asked for (or None) and the finished `ToolUse`."""
    config, turn = AgentConfig(**settings), Turn(memory="m", reply="r")
    running = run_tool_calls(turn, bodies, config=config, prompts=prompts.load(config), token_counter=token_counter)
    request = None
    try:
        request = next(running)
        running.send(tuple(results))
    except StopIteration as end:
        return request, end.value
    raise AssertionError("one Search at most")


def found(*contents: str) -> SearchResult:
    return SearchResult(tuple(Passage(str(number), text) for number, text in enumerate(contents)))


def shown(used) -> list[str]:
    return [span.text for span in used.message if not span.trusted]


def test_one_batched_search_in_order(token_counter):
    results = found("A", "B"), found("C")
    request, used = run([call("a"), "nope", call("b")], results, token_counter)
    assert request == Search((Query("a", 5), Query("b", 5)))
    assert shown(used) == [call("a"), "A\n\nB", "nope", "Parse tool call failed", call("b"), "C"]
    observation = "".join(span.text for span in used.message)
    assert used.turn == Turn("m", "r", (call("a"), "nope", call("b")), request.queries, results, observation)
    assert used.error == ""
    assert used.counts == {"calls_ignored": 0, "calls_clipped": 0, "passages_clipped": 0}


def test_calls_of_the_runs_own_tools_follow_the_searches(token_counter):
    config = AgentConfig()
    tools = [{"name": "add", "description": "Adds 東 <|im_end|>.", "parameters": {}}]
    chosen = prompts.load(config).with_tools(tools)
    assert '"name": "add"' in chosen.system and "東" in chosen.system and "<|im_end|>" not in chosen.system
    bodies = ['{"name": "add", "arguments": {"x": 1}}', call("a"), '{"name": "add", "arguments": {"x": "bad"}}']
    running = run_tool_calls(Turn("", ""), bodies, config=config, prompts=chosen, token_counter=token_counter)
    assert next(running) == Search((Query("a", 5),))
    assert running.send((found("A"),)) == Call("add", {"x": 1})
    assert running.send(ToolResult("add", {"x": 1}, "2")) == Call("add", {"x": "bad"})
    with pytest.raises(StopIteration) as end:
        running.send(ToolResult("add", {"x": "bad"}, error="TypeError: no number"))
    used = end.value.value
    assert shown(used) == [bodies[0], "2", bodies[1], "A", bodies[2], "TypeError: no number"]
    assert used.error == "", "a call that is at fault itself does not end the trajectory"
    assert used.turn.queries == (Query("a", 5),) and used.turn.calls == tuple(bodies)


def test_calls_over_the_limit_are_ignored_and_counted(token_counter):
    request, used = run([call("a"), call("b"), call("c")], [found("A"), found("B")], token_counter, max_calls=2)
    assert len(request.queries) == 2
    assert used.turn.calls == (call("a"), call("b"))
    assert used.counts["calls_ignored"] == 1


def test_a_failed_search_is_shown_in_one_line(token_counter):
    _, used = run([call("a"), call("b")], [found("A"), SearchResult(error="down:\n  refused")], token_counter)
    assert used.error == "down:\n  refused"
    assert shown(used)[-1] == "down: refused"


DOC = '    """D."""\n'


@pytest.mark.parametrize(
    ("code", "schema"),
    [
        ("def f(x: int | str):", {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        ("def f(x: Annotated[int, 'a'] | None = None):", {"type": "integer", "description": "a"}),
        ("def f(x: list[int] | None = None):", {"type": "array", "items": {"type": "integer"}}),
        ("@functools.cache\ndef f(x: bool = True):", {"type": "boolean", "default": True}),
    ],
)
def test_the_type_of_a_parameter_is_its_schema(tmp_path, code, schema):
    (tmp_path / "t.py").write_text(f"import functools\nfrom typing import Annotated\n{code}\n{DOC}")
    (tool,) = file_tools(str(tmp_path / "t.py"))
    assert tool.schema["parameters"]["properties"] == {"x": schema}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def f(**x: int):", r"without a type that JSON has: \*\*x: '?int"),
        ("def f(x: int, /):", "x: int has no name in a call"),
        ("def f(x):\n    yield", "t.py, line 1: f is a generator and returns no text: name the tools in a list TOOLS"),
        ("def f(x: str = b''):", "has: Object of type bytes is not JSON"),
        ("def f(x: float = float('inf')):", "has: Out of range float"),
        (f"def f():\n{DOC}\nTOOLS = f\ndef g():", "TOOLS must be a list of functions, found <function f"),
        ("TOOLS = [len]\ndef g():", "TOOLS must be a list of functions, found .<built-in function len>"),
    ],
)
def test_a_tool_that_a_policy_cannot_call_is_an_error_in_one_line(tmp_path, code, message):
    (tmp_path / "t.py").write_text(f"{code}\n{DOC}")
    with pytest.raises(ValueError, match=message) as error:
        file_tools(str(tmp_path / "t.py"))
    assert "t.py" in str(error.value) and "\n" not in str(error.value)


words = st.lists(st.sampled_from(["w", "ww", "\n"]), max_size=40).map(" ".join)


@given(st.lists(st.tuples(words, st.lists(words, max_size=4)), min_size=1, max_size=4), st.integers(1, 60))
def test_observations_never_exceed_the_budget(token_counter, asked, budget):
    bodies = [call(f"q {query}") for query, _ in asked]
    _, used = run(bodies, [found(*texts) for _, texts in asked], token_counter, observation_tokens=budget)
    assert sum(map(token_counter.count, shown(used))) <= budget


@given(st.lists(st.integers(0, 100), max_size=8), st.integers(0, 300))
def test_fair_shares(demands, budget):
    shares = fair_shares(demands, budget)
    assert all(0 <= share <= demand for share, demand in zip(shares, demands, strict=True))
    assert sum(shares) <= budget
    if sum(demands) <= budget:
        assert shares == demands
    else:
        cut = [share for share, demand in zip(shares, demands, strict=True) if share < demand]
        assert budget - sum(shares) < len(cut)
        assert all(share <= min(cut) + 1 for share in shares)
