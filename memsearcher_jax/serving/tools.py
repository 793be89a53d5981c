"""The agent as MCP tools: `ask` for agents that search, `memorize` and `recall` for those that read streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from importlib.metadata import version
from typing import Any
from weakref import WeakValueDictionary

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel

from memsearcher_jax.http.server import Overloaded
from memsearcher_jax.report.sources import sources_of
from memsearcher_jax.rl.rollout import Rollout
from memsearcher_jax.serving.agent import AgentService, Event, RequestParams, check_text
from memsearcher_jax.types import Outcome, Passage, StopReason

MAX_NAME = 200  # characters


class Answer(BaseModel):
    answer: str
    sources: list[Passage]  # those that contain the answer


class Memorized(BaseModel):
    chunks: int  # that were read
    items: int  # of the memory
    tokens: int


def make_tools(agent: AgentService) -> MCPServer:
    """The tools of the agent; an error that a tool raises is a result with `is_error`."""
    server = MCPServer("memsearcher_jax", version=version("memsearcher_jax"), log_level="WARNING")
    memories: dict[str, Any] = {}
    max_memories = agent.limits.max_memories
    reader = agent.reader
    # Texts are added one by one. A lock exists while a request uses it: clients may send any number of names.
    locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def ask(question: str, context: Context) -> Answer:
        """Answer a question: the agent searches its passages for as many turns as it needs."""
        with _tool_errors():
            await agent.check_question(question)
            outcome = await _finish(agent.ask(question, RequestParams()), context)
            if outcome.stop is not StopReason.ANSWERED:
                raise ValueError(f"no answer: {outcome.error or outcome.stop.description}")
        return Answer(answer=outcome.answer, sources=sources_of(outcome)[0])

    async def memorize(text: str, context: Context, memory: str = "default") -> Memorized:
        """Read a text into a memory, which keeps what it knows from earlier texts. `memory`: the name of the memory."""
        with _tool_errors():
            assert reader is not None, "only its tool"
            check_text(text, "the text")
            if len(memory) > MAX_NAME:
                raise ValueError(f"the name of a memory has at most {MAX_NAME} characters")
            async with locks.setdefault(memory, asyncio.Lock()):
                # A lock is held for each name under way, also for those that have no memory yet.
                names = {*memories, *locks}
                if memory not in memories and len(names) > max_memories:
                    raise ValueError(f"there are {max_memories} memories: no other can be created")
                outcome = await _finish(agent.memorize([text], memories.get(memory), RequestParams()), context)
                if outcome.stop is not StopReason.STREAM_READ:
                    raise ValueError(f"not memorized: {outcome.error or outcome.stop.description}")
                memories[memory] = reader.remembered(outcome)
        counts = outcome.counts
        return Memorized(chunks=len(outcome.turns), items=counts["memory_items"], tokens=counts["memory_tokens"])

    async def recall(question: str, memory: str = "default") -> str:
        """Answer a question from a memory that `memorize` has written. `memory`: the name of the memory."""
        with _tool_errors():
            await agent.check_question(question)
            if memory not in memories:
                raise ValueError(f"there is no memory {memory!r}: call memorize first")
            completion = await agent.recall(question, memories[memory])
            if completion.error:
                raise ValueError(f"no answer: {completion.error}")
        return completion.text

    tools = (memorize, recall) if reader else (ask,)
    for tool in tools:
        server.tool()(tool)
    return server


@contextlib.contextmanager
def _tool_errors() -> Iterator[None]:
    """MCP shows clients the message of a ToolError alone."""
    try:
        yield
    except TimeoutError:
        raise ToolError("the request took too long") from None
    except (ValueError, RuntimeError, ConnectionError, Overloaded) as error:
        raise ToolError(str(error)) from None


async def _finish(events: AsyncGenerator[Event | Rollout], context: Context) -> Outcome:
    """What the workflow returns; searches and memories are reported as progress."""
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, Rollout):
                assert event.outcome is not None, "nothing pauses requests"
                return event.outcome
            turn = event["turn"]
            if event["type"] == "search":
                await context.report_progress(turn, message=f"search: {'; '.join(event['queries'])}")
            elif event["type"] == "memory":
                await context.report_progress(turn, message=f"memory: {event['text']}")
            elif event["type"] == "turn":
                await context.report_progress(turn, message=f"turn {turn}")
    raise AssertionError("the last event is the result")
