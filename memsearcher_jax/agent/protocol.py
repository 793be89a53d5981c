"""The tags that a policy writes, taken apart: thoughts, tool calls, memories, boxed answers.

Every function here is total: whatever text a policy writes, none of them raises.
"""

from __future__ import annotations

import json
import re

from memsearcher_jax.agent.types import Query

THINK = "<think>"

CALL_UNREADABLE = "Parse tool call failed"
ARGUMENTS_UNREADABLE = "Parse query failed"
QUERY_INVALID = "invalid query"
TOP_N_INVALID = "invalid top_n"

# An open thought hides the rest of the text: a generation starts inside one, because the prompt opens it.
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)

_SPACED_BOX = "\\boxed "
_BOX = "\\boxed"


def tool_calls(text: str) -> list[str]:
    """The stripped bodies of all `<tool_call>` pairs, in order; [] where the tags do not pair up."""
    return _bodies(text, "tool_call")


def memory(text: str) -> str:
    """The stripped body of the first `<memory>` pair; "" where there is none or the tags do not pair up."""
    return next(iter(_bodies(text, "memory")), "")


def without_thoughts(text: str) -> str:
    """`text` less every `<think>` part; a thought that is never closed reaches to the end."""
    return _THOUGHT.sub("", text)


def boxed_answer(text: str) -> str | None:
    """What the last box outside `<think>` holds, or None. `text` includes the `<think>` that the prompt opened."""
    return last_box(without_thoughts(text))


def last_box(text: str) -> str | None:
    r"""What the last `\boxed{...}` of `text` holds, or None if there is none or it is never closed.

    Quirk of the original: a `\boxed` followed by a space takes precedence wherever it stands, and holds all up to
    the next `$` or the end.
    """
    _, spaced, rest = text.rpartition(_SPACED_BOX)
    if spaced:
        return rest.partition("$")[0]
    _, found, rest = text.rpartition(_BOX)
    if not found or not rest.startswith("{"):
        return None
    depth = 0
    for position, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[1:position]
    return None


def parse_call(body: str, *, default_top_n: int, max_top_n: int) -> Query | str:
    """The query of one tool call, or one line that tells the policy what is wrong with the call.

    The function's name is not checked, as in the original. `top_n` is at least 1; more than `max_top_n` gives that.
    """
    arguments = _arguments(body)
    if isinstance(arguments, str):
        return arguments
    query, top_n = arguments.get("query"), arguments.get("top_n")
    if not isinstance(query, str) or not query.strip():
        return QUERY_INVALID
    if top_n is None:
        top_n = default_top_n
    # bool is an int in Python, but `true` is no number of passages
    if not isinstance(top_n, int) or isinstance(top_n, bool) or top_n < 1:
        return TOP_N_INVALID
    # JSON may escape half of a surrogate pair, which no encoder behind this point accepts
    return Query(query.encode("utf-8", "replace").decode("utf-8"), min(top_n, max_top_n))


def is_json(text: str) -> bool:
    """Whether `text` is JSON that this interpreter can read; nesting beyond its depth limit is not."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _arguments(body: str) -> dict | str:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return CALL_UNREADABLE
    if not isinstance(call, dict) or "arguments" not in call:
        return CALL_UNREADABLE
    return call["arguments"] if isinstance(call["arguments"], dict) else ARGUMENTS_UNREADABLE


def _bodies(text: str, tag: str) -> list[str]:
    """Bodies from each opening tag to the next closing one, provided that n-th opening stands before n-th closing."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    opens = [match.start() for match in re.finditer(opening, text)]
    closes = [match.start() for match in re.finditer(closing, text)]
    if len(opens) != len(closes) or any(start > end for start, end in zip(opens, closes, strict=True)):
        return []
    return [body.strip() for body in re.findall(f"{opening}(.*?){closing}", text, re.DOTALL)]
