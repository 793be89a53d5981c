"""What a judge is asked about Mem-alpha's calls, and what its replies say. Every function here is total."""

from __future__ import annotations

import json
import re

from memsearcher_jax.agent.memalpha_memory import Store, as_text
from memsearcher_jax.agent.memalpha_tools import INSERT, UPDATE, Call, read_arguments

_CONTENT = {INSERT: "content", UPDATE: "new_content"}
_BLOCK = re.compile(r"```(?:json)?\s*(\{.*?\})\s*```", re.DOTALL)


def judged_content(call: Call) -> tuple[Store, str] | None:
    """The store and the text that a judge looks at; None for a call that is invalid without a look.

    As in the original it does not matter whether the call worked: a text may be good although its id was wrong.
    """
    arguments = read_arguments(call.arguments)
    if call.name not in _CONTENT or not isinstance(arguments, dict):
        return None
    kind, content = arguments.get("memory_type"), arguments.get(_CONTENT[call.name])
    name = kind.removesuffix("_memory") if isinstance(kind, str) else ""
    text = "" if content is None else as_text(content)
    if name not in {store.value for store in Store} or not text.strip():
        return None
    return Store(name), text


def read_verdict(reply: str) -> bool | None:
    """Whether the judge finds a content valid; None where the reply does not say so in a JSON block."""
    found = _BLOCK.search(reply)
    try:
        verdict = json.loads(found[1] if found else reply)
    except (ValueError, RecursionError):
        return None
    valid = verdict.get("VALID") if isinstance(verdict, dict) else None
    return valid if isinstance(valid, bool) else None
