"""Opens the tools of a run: functions of a file, servers of the Model Context Protocol, or a run's recorded results."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import json
import os
import shlex
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.tool_functions import OwnTools, ServerDied, Tool
from memsearcher_jax.agent.tool_state import named_tools
from memsearcher_jax.http.client import async_client, is_unreachable
from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.trajectories import read_trajectories
from memsearcher_jax.rl.config import read_key
from memsearcher_jax.types import Problem, ToolResult

if TYPE_CHECKING:
    from mcp import Client, MCPError
    from mcp.types import CallToolResult

MCP = "mcp:"
TOOLS_FILE = "tools.json"  # the schemas of a run's tools
STATE = "per_trajectory"  # in a schema: whether each trajectory has a tool of its own
END_SECONDS = 3.0  # in which connections have to end with the process
START_SECONDS = 120.0  # in which a server has to list its tools: Python imports take half a minute on a busy machine


def open_tools(config: AgentConfig, workspace: Path) -> tuple[Tool, ...]:
    """The tools of the settings, whose schemas are kept in `workspace`. Raises ValueError or OSError in one line."""
    if config.replay:
        tools = recorded_tools(Path(config.replay))
    else:
        tools = []
        keys = _keys(config)
        for name in config.tools:
            tools += mcp_tools(name, keys.get(name, "")) if name.startswith(MCP) else named_tools(name)
    names = [tool.name for tool in tools]
    if taken := [name for name in names if names.count(name) > 1 or name == "wikipedia_search"]:
        raise ValueError(f"agent.tools: there are two tools named {taken[0]}: rename one")
    if tools:
        workspace.mkdir(parents=True, exist_ok=True)
        schemas = [tool.schema | {STATE: True} if tool.owner else tool.schema for tool in tools]
        atomic_write(workspace / TOOLS_FILE, json.dumps(schemas, indent=2).encode())
    return tuple(tools)


def _keys(config: AgentConfig) -> dict[str, str]:
    """The key of each server over HTTP that has one."""
    servers = [name for name in config.tools if name.startswith((f"{MCP}http://", f"{MCP}https://"))]
    variables = config.tools_api_key_env
    if variables and len(variables) != len(servers):
        raise ValueError(
            f"agent.tools_api_key_env names {len(variables)} variables, and agent.tools {len(servers)} servers "
            f"{MCP}http://...: name one for each, in their order, and '' for one without a key"
        )
    keys = {}
    for name, variable in zip(servers, variables, strict=False):
        if variable:
            keys[name] = read_key(variable, "agent.tools_api_key_env")
    return keys


def recorded_tools(run: Path) -> list[Tool]:
    """Tools that return what they returned in the trajectories of a run, for equal arguments."""
    if not (run / TOOLS_FILE).is_file():
        raise FileNotFoundError(f"agent.replay {run}: is no run with tools: there is no {TOOLS_FILE} in it")
    results: dict[str, ToolResult] = {}
    for file in sorted((run / "trajectories").glob("*.jsonl.gz")):
        for scored in read_trajectories(file):
            for result in scored.trajectory.tool_results:
                if result.lost:
                    continue
                key = _key(result.tool, result.arguments)
                earlier = results.get(key)
                # A call that failed once, by a time-out for example, may have returned something at another time.
                if earlier is None or (earlier.error and not result.error):
                    results[key] = result

    def answer(name: str, calls: Sequence[dict[str, Any]], timeout: float) -> list[ToolResult]:
        answers = []
        for arguments in calls:
            result = results.get(_key(name, arguments))
            if result is None:
                missing = f"agent.replay {run} has recorded no call of {name} with these arguments"
                result = ToolResult(name, arguments, error=missing)
            answers.append(result)
        return answers

    schemas = json.loads((run / TOOLS_FILE).read_bytes())
    for schema in schemas:
        if schema.get(STATE):
            raise ValueError(
                f"agent.replay {run}: its tool {schema['name']} has a state for each trajectory, so that equal calls "
                "have different results: give its tools again"
            )
    return [Tool(schema, partial(answer, schema["name"]), batches=True) for schema in schemas]


def _key(tool: str, arguments: dict[str, Any]) -> str:
    return json.dumps([tool, arguments], sort_keys=True)


def mcp_tools(name: str, key: str = "") -> list[Tool]:
    """The tools that a server lists, to which every request carries the `key`.

    Raises ConnectionError in one line if it does not answer.
    """
    server = McpServer(name.removeprefix(MCP), key)
    try:
        listed = server.request(_all_tools, START_SECONDS)
        if not listed:
            raise ValueError("its list is empty")
    except Exception as error:
        raise ConnectionError(f"agent.tools {name} lists no tools: {' '.join(str(error).split())}") from error

    schemas = []
    for tool in listed:
        schemas.append({"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema})
    tools = server_tools(server, schemas)
    if not server.has_sessions:
        return tools
    factory = SessionFactory(server.address, key, schemas)
    return [replace(tool, owner=factory) for tool in tools]


def server_tools(server: McpServer, schemas: Sequence[dict[str, Any]]) -> list[Tool]:
    """The tools of a server, called over one connection."""

    def answer(tool: str, calls: Sequence[dict[str, Any]], timeout: float) -> list[ToolResult]:
        results = []
        for arguments in calls:
            reply = server.request(lambda client, arguments=arguments: client.call_tool(tool, arguments), timeout)
            text = reply_text(reply)
            if reply.is_error:
                results.append(ToolResult(tool, arguments, error=text or "it gives no reason"))
            else:
                results.append(ToolResult(tool, arguments, text))
        return results

    return [Tool(schema, partial(answer, schema["name"]), server=server.address) for schema in schemas]


@dataclass(frozen=True, eq=False)
class SessionFactory:
    """Makes a session for each trajectory, with a server that keeps them."""

    name: str  # the address
    key: str = field(repr=False)
    schemas: Sequence[dict[str, Any]]
    has_lifecycle: bool = False  # the first call opens it

    def make(self, problem: Problem) -> OwnTools:
        return Session(McpServer(self.name, self.key), self.schemas)


@dataclass(frozen=True)
class Session(OwnTools):
    """A connection of one trajectory, which its first call opens."""

    server: McpServer
    schemas: Sequence[dict[str, Any]]

    @property
    def tools(self) -> dict[str, Tool]:
        return {tool.name: tool for tool in server_tools(self.server, self.schemas)}

    def close(self, timeout: float) -> None:
        self.server.close()


def reply_text(reply: CallToolResult) -> str:
    """What the policy reads of a reply: its texts, and its structured content unless the texts repeat it.

    The address or the type of what is no text is in brackets.
    """
    texts = []
    for block in reply.content:
        content = getattr(block, "resource", block)
        texts.append(getattr(content, "text", f"[{getattr(content, 'uri', block.type)}]"))
    structured = reply.structured_content
    if structured is not None and not _says(texts, structured):
        texts.append(json.dumps(structured, ensure_ascii=False))
    return "\n".join(texts)


def _says(texts: Sequence[str], structured: Any) -> bool:
    """Whether the texts are the structured content, as servers should, and need not, repeat it."""
    values = [structured]
    if isinstance(structured, dict) and list(structured) == ["result"]:  # what is no object is wrapped in one
        values.append(structured["result"])
    joined = "\n".join(texts)
    parsed = list(map(_parsed, texts))
    return any(value in (joined, _parsed(joined), texts, parsed) for value in values)


def _parsed(text: str) -> Any:
    """The value of a text that is JSON; the text itself for any other."""
    try:
        return json.loads(text)
    except ValueError:
        return text


async def _all_tools(client: Client) -> list[Any]:
    page = await client.list_tools()
    tools = [*page.tools]
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


# A loop has no strong references to its tasks: a connection that nobody uses any more would not be closed, but dropped.
_connections: set[concurrent.futures.Future[None]] = set()


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The loop of all connections, in a thread; not that of coroutines of a user's, which may block theirs."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    atexit.register(_end_connections, loop)
    return loop


def _end_connections(loop: asyncio.AbstractEventLoop) -> None:
    """Ends sessions, and servers that are commands, before the process does."""

    async def end() -> None:
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for connection in connections:
            connection.cancel()
        if connections:
            await asyncio.wait(connections, timeout=END_SECONDS)

    with contextlib.suppress(TimeoutError):
        asyncio.run_coroutine_threadsafe(end(), loop).result(END_SECONDS + 1)


@dataclass(frozen=True)
class _Request:
    """Something to do with the connection to a server."""

    use: Callable[[Client], Awaitable[Any]]
    timeout: float  # seconds, after which it is cancelled
    future: concurrent.futures.Future[Any] = field(default_factory=concurrent.futures.Future)


@dataclass
class McpServer:
    """A connection to a server, in the event loop of all of them; a call after it broke opens it again."""

    address: str  # http://HOST/mcp, or a command that is a server on its standard input and output
    key: str = field(default="", repr=False)  # of a server over HTTP: its bearer token
    requests: asyncio.Queue[_Request] = field(default_factory=asyncio.Queue)
    http_error: str = field(default="", init=False)  # the last status of an error that the server returned
    has_sessions: bool = field(default=False, init=False)  # whether the server keeps a session for each connection
    serving: concurrent.futures.Future[None] = field(init=False)

    def __post_init__(self) -> None:
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise ValueError("agent.tools needs the package mcp: pip install 'memsearcher_jax[serve]'") from error
        self.serving = asyncio.run_coroutine_threadsafe(self._serve(), _event_loop())
        _connections.add(self.serving)
        self.serving.add_done_callback(_connections.discard)

    def close(self) -> None:
        """Ends the connection, and the session of a server that has them."""
        self.serving.cancel()

    def request(self, use: Callable[[Client], Awaitable[Any]], timeout: float) -> Any:
        """What `use` returns; it is cancelled after `timeout` seconds.

        Raises MCPError if the server refuses the request, TimeoutError, ServerDied if the connection was lost during
        the request, and any other ConnectionError if there was none.
        """
        request = _Request(use, timeout)
        _event_loop().call_soon_threadsafe(self.requests.put_nowait, request)
        try:
            return request.future.result(timeout)
        except TimeoutError:
            raise TimeoutError(f"no answer in {timeout:g} s") from None

    async def _serve(self) -> None:
        while True:
            unanswered = [await self.requests.get()]
            is_open = False
            try:
                async with self._connection() as client, asyncio.TaskGroup() as calls:
                    is_open = True
                    self.http_error = ""
                    while True:
                        calls.create_task(self._answer(client, unanswered[-1]))
                        unanswered = [request for request in unanswered if not request.future.done()]
                        unanswered.append(await self.requests.get())
            except* Exception as errors:
                error = self._lost(errors, is_open)
                for request in unanswered:
                    if not request.future.done():
                        request.future.set_exception(error)

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[Client]:
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        if not self.address.startswith(("http://", "https://")):
            command, *arguments = shlex.split(self.address)
            server = StdioServerParameters(command=command, args=arguments, env={**os.environ})
            async with Client(stdio_client(server)) as client:
                yield client
            return
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        http_client = async_client(self.address, headers, {"response": [self._note_status]})
        transport = streamable_http_client(self.address, http_client=http_client)
        async with http_client, Client(transport) as client:
            yield client

    async def _note_status(self, response: Any) -> None:
        self.has_sessions = self.has_sessions or "mcp-session-id" in response.headers
        if response.status_code >= 400:
            self.http_error = f"status {response.status_code} {response.reason_phrase}"

    async def _answer(self, client: Client, request: _Request) -> None:
        """Answers a request. What is raised has broken the connection."""
        from mcp import MCPError

        try:
            async with asyncio.timeout(request.timeout):
                result = await request.use(client)
        except (MCPError, RuntimeError, ValueError, TimeoutError) as error:  # a result may break the tool's schema
            if isinstance(error, MCPError) and self._has_lost_connection(error):
                raise
            outcome = partial(request.future.set_exception, error)
        else:
            outcome = partial(request.future.set_result, result)
        outcome()

    def _has_lost_connection(self, error: MCPError) -> bool:
        """Whether an error is of the client, which makes one for an HTTP status and for what is no answer."""
        from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST, PARSE_ERROR

        is_http_error = error.error.message == "Server returned an error response"
        return is_http_error or error.error.code in (CONNECTION_CLOSED, INVALID_REQUEST, PARSE_ERROR)

    def _lost(self, error: BaseException, is_open: bool) -> ConnectionError:
        """What the requests get that were not answered when the connection broke, or could not be opened."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if self.http_error:
            reason = self.http_error
            if self.http_error.startswith(("status 401", "status 403")):
                reason += ": name the environment variable with its key in agent.tools_api_key_env"
        if self.key:
            reason = reason.replace(self.key, "***")
        has_closed = isinstance(error, MCPError) and error.error.code == CONNECTION_CLOSED
        has_broken = not isinstance(error, MCPError) and not is_unreachable(error)
        kind = ServerDied if is_open and (has_closed or has_broken) else ConnectionError
        return kind(f"{self.address}: {reason}")
