"""Parses the tags that a policy writes: thoughts, tool calls, memories, boxed answers.

Every function here is total: no text that a policy can write makes it raise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence

from memsearcher_jax.types import Call, Completion, FinishReason, Outcome, Query, StopReason, Turn, encodable

THINK = "<think>"

STOP_REASONS = {
    FinishReason.LENGTH: StopReason.CUT_OFF,
    FinishReason.FORGED_TURN: StopReason.FORGED_TURN,
    FinishReason.CONTEXT_FULL: StopReason.CONTEXT_FULL,
}
"""The finish reasons that end a trajectory, whatever the text of the completion."""

# An open thought hides the rest of the text: a generation starts inside one, because the prompt opens it.
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


def tool_calls(text: str) -> list[str]:
    """The stripped bodies of all `<tool_call>` pairs, in order; [] if the tags are not balanced."""
    return _bodies(text, "tool_call")


def memory(text: str) -> str:
    """The stripped body of the first `<memory>` pair; "" if there is none or the tags are not balanced."""
    return next(iter(_bodies(text, "memory")), "")


def without_thoughts(text: str) -> str:
    """`text` without its `<think>` spans; an unclosed thought extends to the end."""
    return _THOUGHT.sub("", text)


def boxed_answer(text: str) -> str | None:
    """The content of the last box outside `<think>`, or None. `text` includes the `<think>` that the prompt opened."""
    return last_box(without_thoughts(text).strip())


def final_answer(completion: Completion, opening: str = THINK) -> tuple[StopReason, str]:
    """The stop reason and the answer of a trajectory that ends with this completion after the prompt's `opening`."""
    if completion.finish in STOP_REASONS:
        return STOP_REASONS[completion.finish], ""
    answer = boxed_answer(opening + completion.text)
    return (StopReason.NO_ANSWER, "") if answer is None else (StopReason.ANSWERED, answer)


def ended(stop: StopReason, answer: str, turns: Sequence[Turn], last: Turn, counts: Mapping[str, int]) -> Outcome:
    """The outcome of a trajectory that ends in its `last` turn, or before it if that did not fit the context."""
    shown = turns if stop is StopReason.CONTEXT_FULL else (*turns, last)
    return Outcome(stop, answer, tuple(shown), dict(counts))


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` of `text`, or None if there is none or it is never closed.

    As in the original, a `\boxed` followed by a space takes precedence at any position, and its content extends to the
    next `$` or the end.
    """
    _, spaced, rest = text.rpartition("\\boxed ")
    if spaced:
        return rest.partition("$")[0]
    _, box, rest = text.rpartition("\\boxed")
    if not box or not rest.startswith("{"):
        return None
    depth = 0
    for position, character in enumerate(rest):
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
        if depth == 0:
            return rest[1:position]
    return None


def parse_call(body: str, *, default_top_n: int, max_top_n: int, tools: Container[str] = ()) -> Query | Call | str:
    """The query of one tool call, the call of one of the run's own `tools`, or a one-line error message for the policy.

    As in the original, the name of the search is not checked. A `top_n` below 1 is an error; it is capped at
    `max_top_n`.
    """
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        call = None
    if not isinstance(call, dict):
        return "Parse tool call failed"
    name = call.get("name")
    arguments = call.get("arguments", {})
    if isinstance(name, str) and name in tools and isinstance(arguments, dict):
        try:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)  # JSON has no NaN, and logs refuse it
        except (ValueError, RecursionError):
            return "Parse tool call failed"
        return Call(name, json.loads(encodable(text)))
    if "arguments" not in call:
        return "Parse tool call failed"
    if not isinstance(arguments, dict):
        return "Parse query failed"
    query = arguments.get("query")
    top_n = arguments.get("top_n")
    if not isinstance(query, str) or not query.strip():
        return "invalid query"
    if top_n is None:
        top_n = default_top_n
    # bool is a subclass of int
    if not isinstance(top_n, int) or isinstance(top_n, bool) or top_n < 1:
        return "invalid top_n"
    return Query(encodable(query), min(top_n, max_top_n))


def _bodies(text: str, tag: str) -> list[str]:
    """The text between each opening tag and the next closing tag, if every n-th opening precedes the n-th closing."""
    opening = f"<{tag}>"
    closing = f"</{tag}>"
    opens = [match.start() for match in re.finditer(opening, text)]
    closes = [match.start() for match in re.finditer(closing, text)]
    if len(opens) != len(closes) or any(start > end for start, end in zip(opens, closes, strict=True)):
        return []
    return [body.strip() for body in re.findall(f"{opening}(.*?){closing}", text, re.DOTALL)]
