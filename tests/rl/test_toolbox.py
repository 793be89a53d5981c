"""Servers of tools that cannot be reached."""

import pytest

from memsearcher_jax.rl import toolbox


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ("mcp:", "not enough values"),
        ('mcp:python "x', "No closing quotation"),
        ("mcp:no_such_command", "No such file"),
        ("mcp:sleep 60", "no answer in 1 s"),
    ],
)
def test_a_server_that_does_not_start_is_one_line(server, reason, monkeypatch):
    pytest.importorskip("mcp")
    monkeypatch.setattr(toolbox, "START_SECONDS", 1.0 if "sleep" in server else 20.0)
    with pytest.raises(ConnectionError, match=rf"agent\.tools {server} lists no tools: .*{reason}") as error:
        toolbox.mcp_tools(server)
    assert "\n" not in str(error.value)
