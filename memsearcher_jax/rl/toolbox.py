"""Opens the tools of a run: functions of a file, servers of the Model Context Protocol, or a run's recorded results."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import shlex
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.tool_functions import Tool, file_tools
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.trajectories import read_trajectories
from memsearcher_jax.types import ToolResult

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

MCP = "mcp:"
TOOLS_FILE = "tools.json"  # the schemas of a run's tools
START_SECONDS = 30.0  # in which a server has to list its tools


def open_tools(config: AgentConfig, workspace: Path) -> tuple[Tool, ...]:
    """The tools of the settings, whose schemas are kept in `workspace`. Raises ValueError or OSError in one line."""
    if config.replay:
        tools = recorded_tools(Path(config.replay))
    else:
        tools = []
        for name in config.tools:
            tools += mcp_tools(name) if name.startswith(MCP) else file_tools(name)
    names = [tool.name for tool in tools]
    if taken := [name for name in names if names.count(name) > 1 or name == "wikipedia_search"]:
        raise ValueError(f"agent.tools: there are two tools named {taken[0]}: rename one")
    if tools:
        workspace.mkdir(parents=True, exist_ok=True)
        atomic_write(workspace / TOOLS_FILE, json.dumps([tool.schema for tool in tools], indent=2).encode())
    return tuple(tools)


def recorded_tools(run: Path) -> list[Tool]:
    """Tools that return what they returned in the trajectories of a run, for equal arguments."""
    if not (run / TOOLS_FILE).is_file():
        raise FileNotFoundError(f"agent.replay {run}: is no run with tools: there is no {TOOLS_FILE} in it")
    results: dict[str, ToolResult] = {}
    for file in sorted((run / "trajectories").glob("*.jsonl.gz")):
        for scored in read_trajectories(file):
            for result in scored.trajectory.tool_results:
                if not result.lost:
                    results.setdefault(_key(result.tool, result.arguments), result)

    def answer(name: str, calls: Sequence[dict[str, Any]]) -> list[ToolResult]:
        answers = []
        for arguments in calls:
            result = results.get(_key(name, arguments))
            if result is None:
                missing = f"agent.replay {run} has recorded no call of {name} with these arguments"
                result = ToolResult(name, arguments, error=missing)
            answers.append(result)
        return answers

    schemas = json.loads((run / TOOLS_FILE).read_bytes())
    return [Tool(schema, partial(answer, schema["name"]), batches=True) for schema in schemas]


def _key(tool: str, arguments: dict[str, Any]) -> str:
    return json.dumps([tool, arguments], sort_keys=True)


def mcp_tools(name: str) -> list[Tool]:
    """The tools that a server lists. Raises ConnectionError in one line if it does not answer."""
    server = McpServer(name.removeprefix(MCP))
    try:
        listed = server.request(_all_tools, START_SECONDS)
        if not listed:
            raise ValueError("its list is empty")
    except Exception as error:
        reason = " ".join(str(error).split()) or f"no answer in {START_SECONDS:g} s"
        raise ConnectionError(f"agent.tools {name} lists no tools: {reason}") from error

    def answer(tool: str, calls: Sequence[dict[str, Any]]) -> list[ToolResult]:
        results = []
        for arguments in calls:
            reply = server.request(lambda client, arguments=arguments: client.call_tool(tool, arguments))
            text = _text_of(reply)
            if reply.is_error:
                results.append(ToolResult(tool, arguments, error=text or "it gives no reason"))
            else:
                results.append(ToolResult(tool, arguments, text))
        return results

    tools = []
    for tool in listed:
        schema = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        tools.append(Tool(schema, partial(answer, tool.name)))
    return tools


def _text_of(reply: CallToolResult) -> str:
    """The texts of a reply, with the address or the type of what is no text in brackets."""
    texts = []
    for block in reply.content:
        content = getattr(block, "resource", block)
        texts.append(getattr(content, "text", f"[{getattr(content, 'uri', block.type)}]"))
    text = "\n".join(texts)
    if not text and reply.structured_content is not None:  # which a server should, and need not, repeat as text
        return json.dumps(reply.structured_content)
    return text


async def _all_tools(client: Client) -> list[Any]:
    page = await client.list_tools()
    tools = [*page.tools]
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


@dataclass
class McpServer:
    """A connection to a server, in a thread with an event loop of its own; a call after it broke opens it again."""

    address: str  # http://HOST/mcp, or a command that is a server on its standard input and output
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    requests: asyncio.Queue[tuple[Any, concurrent.futures.Future[Any]]] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise ValueError("agent.tools needs the package mcp: pip install 'memsearcher_jax[serve]'") from error
        threading.Thread(target=self.loop.run_until_complete, args=(self._serve(),), daemon=True).start()

    def request(self, use: Callable[[Client], Awaitable[Any]], timeout: float | None = None) -> Any:
        """What `use` returns. Raises ConnectionError if the server is gone, MCPError if it refuses the call."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.loop.call_soon_threadsafe(self.requests.put_nowait, (use, future))
        return future.result(timeout)

    async def _serve(self) -> None:
        from mcp import Client, StdioServerParameters, stdio_client

        while True:
            use, future = await self.requests.get()
            target: Any = self.address
            try:
                if not self.address.startswith(("http://", "https://")):
                    command, *arguments = shlex.split(self.address)
                    target = stdio_client(StdioServerParameters(command=command, args=arguments, env={**os.environ}))
                async with Client(target) as client, asyncio.TaskGroup() as calls:
                    while True:
                        calls.create_task(self._answer(client, use, future))
                        use, future = await self.requests.get()
            except* Exception as errors:
                if not future.done():
                    future.set_exception(ConnectionError(f"{self.address}: {_cause(errors)}"))

    async def _answer(self, client: Client, use: Any, future: concurrent.futures.Future[Any]) -> None:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST, PARSE_ERROR

        try:
            future.set_result(await use(client))
        except BaseException as error:  # also the cancellation by a call that found the server gone
            if isinstance(error, MCPError):  # of the server, or of the client for an HTTP status and what is no answer
                connection_lost = error.error.code in (CONNECTION_CLOSED, INVALID_REQUEST, PARSE_ERROR)
                http_error = error.error.message == "Server returned an error response"
                server_answered = not connection_lost and not http_error
            else:
                server_answered = isinstance(error, RuntimeError | ValueError)  # with what breaks the tool's schema
            if server_answered:
                future.set_exception(error)
                return
            future.set_exception(ConnectionError(f"{self.address}: {_cause(error)}"))
            raise


def _cause(error: BaseException) -> str:
    """The first error of a group, in one line; a call is cancelled where another one has lost the connection."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, asyncio.CancelledError):
        return "the connection was lost"
    return " ".join(f"{type(error).__name__}: {error}".split())
