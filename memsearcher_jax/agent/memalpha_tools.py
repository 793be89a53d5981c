"""Mem-alpha's tool calls: from a reply to typed operations or faults, and from those to a new memory.

A call is written with the markers of qwen-agent: a name on one line, then its arguments as JSON. Models drop braces,
quotes and ends, so the arguments are repaired by json-repair before they are read, as in the original.

Every function here is total: whatever text a policy writes, none of them raises.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from json_repair import repair_json

from memsearcher_jax.agent.memalpha_memory import ErrorKind, Fault, Json, Memory, Result, Status, Store
from memsearcher_jax.agent.memalpha_search import search
from memsearcher_jax.agent.types import Ruler

INSERT, UPDATE, DELETE, SEARCH = "new_memory_insert", "memory_update", "memory_delete", "search_memory"
OFFERED = (INSERT, UPDATE, DELETE)
"""What a policy may call while it memorises. The original also runs `search_memory`, which it never offers."""

_FLOWER = "✿"
_NAME, _ARGUMENTS, _RESULT, _RETURN = (f"✿{word}✿" for word in ("FUNCTION", "ARGS", "RESULT", "RETURN"))
_NAME_OPENS, _ARGUMENTS_OPEN = f"{_NAME}:", f"{_ARGUMENTS}:"

# Closing tags of an older format, in the order in which the original looks for them.
_ENDS = ("</memory_insert>", "</memory_update>", "</memory_delete>", "</done>")

_WHITE = re.compile(r"\s*")


class Call(NamedTuple):
    """One call as it was written."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Insert:
    store: Store  # never the core
    content: Json


@dataclass(frozen=True)
class Update:
    store: Store
    content: Json
    item_id: Json = None  # ignored for the core


@dataclass(frozen=True)
class Delete:
    store: Store
    item_id: Json = None  # ignored for the core


@dataclass(frozen=True)
class Search:
    store: Store  # never the core
    query: str


Operation = Insert | Update | Delete | Search


def kept_reply(reply: str) -> str:
    """The part of a reply that counts: up to an old closing tag, and before a result that the model made up."""
    end = next((end for end in _ENDS if end in reply), None)
    if end is not None:
        reply = reply.partition(end)[0] + end
    before, made_up, _ = reply.partition(f"{_RESULT}:")
    return before.strip() if made_up else reply


def tool_calls(reply: str) -> tuple[Call, ...]:
    """The calls of a kept reply, in order.

    A call is lost, as in the original, if its arguments hold a flower or run into half a marker. The markers are
    looked up one by one, because a regular expression for a call takes cubic time on a long run of spaces.
    """
    held = _arguments(reply)
    places = sorted(held)
    calls, begin = [], 0
    while (opens := reply.find(_NAME_OPENS, begin)) >= 0:
        begin = opens + len(_NAME_OPENS)
        found = _name_at(reply, begin, places)
        if found is not None:
            name, marker = found
            arguments, begin = held[marker]
            calls.append(Call(name, arguments))
    return tuple(calls)


def plain_text(reply: str) -> str:
    """What a reply without calls says, less a leading thought."""
    _, thought, after = reply.partition("<think>")
    _, closed, answer = after.partition("</think>")
    if thought and closed:
        return answer.strip()
    return reply.strip().removeprefix("<think>").strip()


def read_arguments(text: str) -> Json | Fault:
    """The JSON value that `text` holds or can be repaired to."""
    try:
        repaired = repair_json(text, ensure_ascii=False)
        # JSON may escape half of a surrogate pair, which no encoder behind this point accepts.
        return json.loads(repaired.encode("utf-8", "replace").decode("utf-8"))
    except (ValueError, RecursionError):
        return Fault(ErrorKind.UNREADABLE, "the arguments are no JSON and can not be repaired to any")


def read_call(call: Call, offered: Sequence[str] = OFFERED) -> Operation | Fault:
    """What `call` asks for, or what is wrong with it; whether the memory allows it is not looked at."""
    arguments = read_arguments(call.arguments)
    if isinstance(arguments, Fault):
        return arguments
    if call.name not in offered:
        return Fault(ErrorKind.MISSING, f"there is no tool {call.name!r}")
    if not isinstance(arguments, dict):
        return Fault(ErrorKind.UNEXPECTED, "the arguments are no JSON object")
    return _READERS[call.name](arguments)


def run_call(memory: Memory, call: Call, ruler: Ruler, offered: Sequence[str] = OFFERED) -> tuple[Memory, Result]:
    """The memory after one call, and what became of the call."""
    match read_call(call, offered):
        case Fault() as fault:
            return memory, Result(Status.ERROR, fault)
        case Insert(store, content):
            return memory.insert(store, content, ruler)
        case Update(store, content, item_id):
            return memory.update(store, content, item_id, ruler)
        case Delete(store, item_id):
            return memory.delete(store, item_id)
        case Search(store, query):
            if store not in memory.enabled:
                return memory, Result(Status.ERROR, Fault(ErrorKind.INVALID, f"{store.value} memory is switched off"))
            return memory, Result(Status.OK, hits=search(memory, store, query, min_score=0.0))


def run_calls(
    memory: Memory, calls: Sequence[Call], ruler: Ruler, offered: Sequence[str] = OFFERED
) -> tuple[Memory, tuple[Result, ...]]:
    """Runs `calls` in order, each on what the one before left; one that fails does not stop the next."""
    results = []
    for call in calls:
        memory, result = run_call(memory, call, ruler, offered)
        results.append(result)
    return memory, tuple(results)


def _arguments(text: str) -> dict[int, tuple[str, int]]:
    """Marker position -> arguments and their end, where they reach to the next whole marker or the end of the text."""
    held = {}
    for marker in re.finditer(_ARGUMENTS_OPEN, text):
        begin = marker.end()
        end = text.find(_FLOWER, begin)
        if end < 0:
            end = len(text)
        elif not text.startswith((_RESULT, _RETURN, _NAME), end):
            continue
        if end > begin:
            held[marker.start()] = (_without_comment(text[begin:end].strip()), end)
    return held


def _name_at(text: str, begin: int, places: Sequence[int]) -> tuple[str, int] | None:
    """The name that starts at `begin` and the marker of its arguments, one of the sorted `places`."""
    first = _WHITE.match(text, begin).end()
    line_end = text.find("\n", first)
    line_end = len(text) if line_end < 0 else line_end
    below = _WHITE.match(text, line_end).end()
    last = bisect_right(places, below) - 1
    if first < line_end and last >= 0 and places[last] == below:
        return text[first:line_end].strip(), below
    last = bisect_left(places, line_end) - 1
    # The name may be blank, but there must be one on its line.
    if last < 0 or places[last] < first or not text[begin : places[last]].strip("\n"):
        return None
    return text[first : places[last]].strip(), places[last]


def _without_comment(arguments: str) -> str:
    """Without what follows the last brace of an object, or the end of a code block."""
    if arguments.startswith("{"):
        body, brace, _ = arguments.rpartition("}")
        return body + brace or arguments
    if arguments.startswith("```"):
        body, fence, _ = arguments.rpartition("\n```")
        return body + fence or arguments
    return arguments


def _missing(name: str) -> Fault:
    return Fault(ErrorKind.MISSING, f"the argument {name!r} is missing")


def _unknown_store(value: Json, tool: str) -> Fault:
    return Fault(ErrorKind.UNEXPECTED, f"{tool} takes no memory_type {value!r}")


def _item_store(value: Json) -> Store | None:
    return {"semantic_memory": Store.SEMANTIC, "episodic_memory": Store.EPISODIC}.get(_key(value))


def _any_store(value: Json) -> Store | None:
    return Store.CORE if value == "core_memory" else _item_store(value)


def _key(value: Json) -> str:
    return value if isinstance(value, str) else ""


def _read_insert(arguments: dict) -> Insert | Fault:
    if "memory_type" not in arguments:
        return _missing("memory_type")
    store = _item_store(arguments["memory_type"])
    if store is None:
        return _unknown_store(arguments["memory_type"], INSERT)
    return Insert(store, arguments["content"]) if "content" in arguments else _missing("content")


def _read_update(arguments: dict) -> Update | Fault:
    if "memory_type" not in arguments:
        return _missing("memory_type")
    store = _any_store(arguments["memory_type"])
    if store is None:
        return _unknown_store(arguments["memory_type"], UPDATE)
    if "new_content" not in arguments:
        return _missing("new_content")
    return Update(store, arguments["new_content"], arguments.get("memory_id"))


def _read_delete(arguments: dict) -> Delete | Fault:
    """Unlike the other tools this one takes a store's bare name too."""
    if "memory_type" not in arguments:
        return _missing("memory_type")
    value = arguments["memory_type"]
    store = _any_store(f"{_key(value).replace('_memory', '')}_memory")
    return Delete(store, arguments.get("memory_id")) if store else _unknown_store(value, DELETE)


def _read_search(arguments: dict) -> Search | Fault:
    for name in ("memory_type", "query"):
        if name not in arguments:
            return _missing(name)
    value, query = arguments["memory_type"], arguments["query"]
    if not isinstance(value, str) or not isinstance(query, str):
        return Fault(ErrorKind.UNEXPECTED, f"{SEARCH} takes text for memory_type and query")
    store = _item_store(f"{value.replace('_memory', '')}_memory")
    if store is None:
        return Fault(ErrorKind.INVALID, f"{SEARCH} searches semantic and episodic memory, not {value!r}")
    return Search(store, query)


_READERS = {INSERT: _read_insert, UPDATE: _read_update, DELETE: _read_delete, SEARCH: _read_search}
