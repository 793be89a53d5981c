"""Servers of tools: what the policy reads of their results, keys, and those that cannot be reached."""

import sys
import threading
import time

import pytest
import uvicorn

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.rl import tool_executor, toolbox
from memsearcher_jax.rl.tool_executor import respond, tool_backends
from memsearcher_jax.rl.toolbox import open_tools, reply_text
from memsearcher_jax.types import Call
from tests.http_server import QuietHandler, serving_http, until


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


def reply(structured, *texts):
    types = pytest.importorskip("mcp.types")
    content = [types.TextContent(type="text", text=text) for text in texts]
    return types.CallToolResult(content=content, structured_content=structured)


@pytest.mark.parametrize(
    ("structured", "texts", "shown"),
    [
        (None, ("a", "b"), "a\nb"),
        ({"a": 1}, (), '{"a": 1}'),
        ({"a": 1}, ('{\n  "a": 1\n}',), '{\n  "a": 1\n}'),  # as the SDK repeats it
        ({"result": "a"}, ("a",), "a"),
        ({"result": [1, "b"]}, ("1", "b"), "1\nb"),
        ({"result": 3.5}, ("3.5",), "3.5"),
        ({"rows": [{"price": "3 €"}]}, ("Found 1 row.",), 'Found 1 row.\n{"rows": [{"price": "3 €"}]}'),
    ],
)
def test_structured_content_beside_a_summary_is_shown(structured, texts, shown):
    assert reply_text(reply(structured, *texts)) == shown


KEYED = """
import os
from mcp.server.mcpserver import MCPServer

server = MCPServer("test")


@server.tool()
def who() -> dict:
    \"\"\"Says who asks.\"\"\"
    return {"name": "Åse", "age": None}
"""


@pytest.fixture
def keyed(tmp_path):
    """The address of a server that wants a key, and the keys that it was sent."""
    pytest.importorskip("mcp")
    namespace = {}
    exec(KEYED, namespace)
    app = namespace["server"].streamable_http_app(stateless_http=True, host="127.0.0.1")
    seen = []

    async def guarded(scope, receive, send):
        if scope["type"] == "http":
            seen.append(dict(scope["headers"]).get(b"authorization", b"").decode())
            if seen[-1] != "Bearer k3y":
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b"no: " + seen[-1].encode()})
                return
        await app(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(guarded, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    yield f"mcp:http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp", seen
    server.should_exit = True
    thread.join()


def test_a_server_gets_its_key_and_no_other(keyed, tmp_path, monkeypatch):
    address, seen = keyed
    monkeypatch.setenv("SHOP_KEY", "k3y")
    monkeypatch.setenv("WRONG_KEY", "wr0ng")
    config = AgentConfig(tools=(address,), tools_api_key_env=("SHOP_KEY",))
    (tool,) = open_tools(config, tmp_path)
    result = respond(tool_backends([tool]), Call("who", {}))
    assert result.text.replace("\n", "").replace("  ", "") == '{"name": "Åse","age": null}'
    assert set(seen) == {"Bearer k3y"}
    for variables in ((), ("",), ("WRONG_KEY",)):
        wrong = AgentConfig(tools=(address,), tools_api_key_env=variables)
        with pytest.raises(
            ConnectionError, match=r"status 401 Unauthorized: name .* agent\.tools_api_key_env"
        ) as error:
            open_tools(wrong, tmp_path)
        assert "wr0ng" not in str(error.value)
    with pytest.raises(ValueError, match=r"names 2 variables, and agent\.tools 1 servers mcp:http://"):
        open_tools(AgentConfig(tools=(address,), tools_api_key_env=("SHOP_KEY", "")), tmp_path)
    with pytest.raises(ValueError, match=r"agent\.tools_api_key_env: the environment holds no variable"):
        open_tools(AgentConfig(tools=(address,), tools_api_key_env=("NO_KEY",)), tmp_path)


def test_the_status_of_a_server_that_is_none_is_shown():
    class Gone(QuietHandler):
        def do_POST(self):
            self.send_error(502)

    pytest.importorskip("mcp")
    with serving_http(Gone) as url, pytest.raises(ConnectionError, match=r"lists no tools: .*status 502 Bad Gateway"):
        toolbox.mcp_tools(f"mcp:{url}/mcp")


SLOW = """
import asyncio, pathlib, sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("test")


@server.tool()
async def wait() -> str:
    \"\"\"Waits.\"\"\"
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        pathlib.Path(sys.argv[1]).write_text("cancelled")
        raise
    return "late"


server.run()
"""


def test_a_call_of_a_server_that_took_too_long_is_cancelled(tmp_path):
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(SLOW)
    (tool,) = toolbox.mcp_tools(f"mcp:{sys.executable} {tmp_path}/server.py {tmp_path}/note")
    result = respond(tool_backends([tool], timeout=0.3), Call("wait", {}))
    assert result.error == "TimeoutError: no answer in 0.3 s"
    until(lambda: (tmp_path / "note").exists(), 10)


FRAGILE = """
import asyncio, os, pathlib, sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("test")
starts = pathlib.Path(sys.argv[1])
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")


@server.tool()
async def shout(text: str) -> str:
    \"\"\"Says it louder.\"\"\"
    await asyncio.sleep(0.1)
    if text == "die":
        os._exit(1)
    await asyncio.sleep(0.2)
    return text.upper()


server.run()
"""


def test_a_call_that_kills_a_real_server_is_found_and_the_others_are_answered(tmp_path, monkeypatch):
    pytest.importorskip("mcp")
    monkeypatch.setattr(tool_executor, "OUTAGE_PAUSE", 0.05)
    (tmp_path / "server.py").write_text(FRAGILE)
    tools = toolbox.mcp_tools(f"mcp:{sys.executable} {tmp_path}/server.py {tmp_path}/starts")
    executor = tool_executor.ToolExecutor(
        {"": tool_executor.search_backend(None), **tool_backends(tools, 30.0, max_outage=600.0)}
    )
    for text in ("a", "b", "die", "c"):
        executor.submit(text, Call("shout", {"text": text}))
    results = {}
    began = time.monotonic()
    executor.start()
    while executor.pending:
        executor.wait(1.0)
        results |= dict(executor.completed())
        executor.start()
    assert {text: result.text for text, result in results.items()} == {"a": "A", "b": "B", "die": "", "c": "C"}
    assert results["die"].lost and time.monotonic() - began < 60
    # It died twice: with the others, and of the one call alone. Whether the others are asked before or after the second
    # death decides whether it starts a third time.
    assert (tmp_path / "starts").read_text() in ("xx", "xxx")
