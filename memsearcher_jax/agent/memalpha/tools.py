"""Mem-alpha's tool calls: finds them in a reply, repairs their arguments, and runs them on a memory.

A call uses the markers of qwen-agent: a name on one line, then its arguments as JSON. Models drop braces, quotes and
closing marks, so json-repair repairs the arguments before they are parsed, as in the original.

Every function here is total: no text that a policy can write makes it raise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from json_repair import repair_json

from memsearcher_jax.agent.memalpha.memory import CallResult, ErrorKind, Json, Memory, Status, Store
from memsearcher_jax.agent.memalpha.search import search
from memsearcher_jax.types import TokenCounter, encodable

INSERT = "new_memory_insert"
UPDATE = "memory_update"
DELETE = "memory_delete"
SEARCH = "search_memory"
OFFERED = (INSERT, UPDATE, DELETE)
"""The tools that a policy may call while it reads. The original also runs `search_memory`, which it never offers."""
CONTENT_ARGUMENT = {INSERT: "content", UPDATE: "new_content"}

# The name is the line above the arguments or, which may be blank then, the text before them on their own line.
# Possessive quantifiers (`++`) and the last alternative, which skips a line without a call, bound the time: a long run
# of spaces would take cubic time, one of markers quadratic.
_CALL = re.compile(
    r"✿FUNCTION✿:(?:(?:\s*+([^\n]++)\s*+|\s*+([^\n]+)|(?!\n*✿)\s*+)"
    r"✿ARGS✿:([^✿]++)(?=✿FUNCTION✿|✿RESULT✿|✿RETURN✿|\Z)"
    r"|(?:(?!✿FUNCTION✿:[^\S\n]*+\n)[^\n])*+)"
)

# Closing tags of an older format, in the order in which the original looks for them.
_ENDS = ("</memory_insert>", "</memory_update>", "</memory_delete>", "</done>")

_STORES = {f"{store.value}_memory": store for store in Store}


class Call(NamedTuple):
    """One call as the policy wrote it."""

    name: str
    arguments: str


def truncate_reply(reply: str) -> str:
    """The part of a reply that counts: up to a closing tag of the old format, and before a fabricated tool result."""
    end = next((end for end in _ENDS if end in reply), None)
    if end is not None:
        reply = reply.partition(end)[0] + end
    before, fabricated, _ = reply.partition("✿RESULT✿:")
    return before.strip() if fabricated else reply


def tool_calls(reply: str) -> tuple[Call, ...]:
    """The calls of a truncated reply, in order.

    As in the original, a call is lost if its arguments contain a flower or run into half a marker.
    """
    return tuple(
        Call((line or part).strip(), _without_comment(arguments.strip()))
        for line, part, arguments in _CALL.findall(reply)
        if arguments
    )


def parse_arguments(text: str) -> Json | CallResult:
    """The JSON value that `text` holds or can be repaired to, or an error."""
    try:
        repaired = repair_json(text, ensure_ascii=False)
        # JSON may escape half of a surrogate pair, which no encoder downstream accepts.
        return json.loads(encodable(repaired))
    except (ValueError, RecursionError):
        return CallResult.failed(ErrorKind.UNREADABLE, "the arguments are not JSON and cannot be repaired")


def run_call(
    memory: Memory, call: Call, token_counter: TokenCounter, offered: Sequence[str] = OFFERED
) -> tuple[Memory, CallResult]:
    """The memory after one call, and the result of the call."""
    arguments = parse_arguments(call.arguments)
    if isinstance(arguments, CallResult):
        return memory, arguments
    if call.name not in offered:
        return memory, CallResult.failed(ErrorKind.MISSING, f"there is no tool {call.name!r}")
    if not isinstance(arguments, dict):
        return memory, CallResult.failed(ErrorKind.UNEXPECTED, "the arguments are not a JSON object")
    store = _check_arguments(call.name, arguments)
    if isinstance(store, CallResult):
        return memory, store
    if store not in memory.enabled:
        return memory, CallResult.failed(ErrorKind.INVALID, f"{store.value} memory is disabled")
    if call.name == INSERT:
        return memory.insert(store, arguments["content"], token_counter)
    if call.name == UPDATE:
        return memory.update(store, arguments["new_content"], arguments.get("memory_id"), token_counter)
    if call.name == DELETE:
        return memory.delete(store, arguments.get("memory_id"))
    return memory, CallResult(Status.OK, hits=search(memory, store, arguments["query"], min_score=0.0))


def run_calls(
    memory: Memory, calls: Sequence[Call], token_counter: TokenCounter, offered: Sequence[str] = OFFERED
) -> tuple[Memory, tuple[CallResult, ...]]:
    """Runs `calls` in order, each on the memory that the previous call left. A failed call does not stop the next."""
    results = []
    for call in calls:
        memory, result = run_call(memory, call, token_counter, offered)
        results.append(result)
    return memory, tuple(results)


def content_to_judge(call: Call) -> tuple[Store, str] | None:
    """The store and the text that a judge is asked about; None for a call that is invalid without asking.

    As in the original, the call need not have succeeded: a text may be valid although its id was wrong. What is no text
    is invalid.
    """
    arguments = parse_arguments(call.arguments)
    if call.name not in CONTENT_ARGUMENT or not isinstance(arguments, dict):
        return None
    memory_type = arguments.get("memory_type")
    content = arguments.get(CONTENT_ARGUMENT[call.name])
    name = memory_type.replace("_memory", "") if isinstance(memory_type, str) else ""
    store = _STORES.get(f"{name}_memory")
    return (store, content) if store and isinstance(content, str) and content.strip() else None


def _check_arguments(name: str, arguments: dict[str, Any]) -> Store | CallResult:
    """The store that a call addresses, or what is wrong with its arguments; checks in the order of the original."""
    for required in ("memory_type", "query") if name == SEARCH else ("memory_type",):
        if required not in arguments:
            return CallResult.failed(ErrorKind.MISSING, f"the argument {required!r} is missing")
    memory_type = arguments["memory_type"]
    store = None
    if isinstance(memory_type, str):
        # delete and search also take the name of a store without "_memory"
        takes_bare_name = name in (DELETE, SEARCH)
        full_name = memory_type.replace("_memory", "") + "_memory" if takes_bare_name else memory_type
        store = _STORES.get(full_name)
    if name == SEARCH:
        if not isinstance(memory_type, str) or not isinstance(arguments["query"], str):
            return CallResult.failed(ErrorKind.UNEXPECTED, f"{SEARCH} takes text for memory_type and query")
        if store in (None, Store.CORE):
            return CallResult.failed(
                ErrorKind.INVALID, f"{SEARCH} searches semantic and episodic memory, not {memory_type!r}"
            )
    if store is None or (name == INSERT and store is Store.CORE):
        return CallResult.failed(ErrorKind.UNEXPECTED, f"{name} takes no memory_type {memory_type!r}")
    content = CONTENT_ARGUMENT.get(name)
    if content and content not in arguments:
        return CallResult.failed(ErrorKind.MISSING, f"the argument {content!r} is missing")
    if name in (UPDATE, DELETE) and store is not Store.CORE and isinstance(arguments.get("memory_id"), list | dict):
        return CallResult.failed(ErrorKind.UNEXPECTED, f"{name} takes one id as text")
    return store


def _without_comment(arguments: str) -> str:
    """Drops the text after the last brace of an object, or after the end of a code block."""
    if arguments.startswith("{"):
        body, brace, _ = arguments.rpartition("}")
        return body + brace or arguments
    if arguments.startswith("```"):
        body, fence, _ = arguments.rpartition("\n```")
        return body + fence or arguments
    return arguments
