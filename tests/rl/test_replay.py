"""agent.replay: what the tools of a recorded run returned."""

import json

import pytest

from memsearcher_jax.rl.toolbox import TOOLS_FILE, recorded_tools
from memsearcher_jax.types import ToolResult
from tests.samples import scored, write_shard

TIMED_OUT = ToolResult("shop", {"item": "tea"}, error="no answer after 30 s")
SUCCEEDED = ToolResult("shop", {"item": "tea"}, text="three left")
GONE = ToolResult("shop", {"item": "tea"}, error="the server is gone", lost=True)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ((TIMED_OUT, SUCCEEDED), SUCCEEDED),
        ((SUCCEEDED, TIMED_OUT), SUCCEEDED),
        ((GONE, TIMED_OUT, GONE), TIMED_OUT),
        ((SUCCEEDED, ToolResult("shop", {"item": "tea"}, text="two left")), SUCCEEDED),
    ],
)
def test_a_success_is_replayed_rather_than_a_failure(tmp_path, results, expected):
    """The first success of equal calls, also of one in a later trajectory; where there is none, the first failure."""
    for number, result in enumerate(results):
        write_shard(tmp_path, [scored(id=f"q{number}", tool_results=(result,))], number)
    (tmp_path / TOOLS_FILE).write_text(json.dumps([{"name": "shop", "description": "?", "parameters": {}}]))
    (tool,) = recorded_tools(tmp_path)
    (answer,) = tool.answer([{"item": "tea"}], 1.0)
    assert answer == expected
