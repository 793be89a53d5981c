"""Checks what a workflow asks for, and runs one with plain function calls.

A person at a keyboard, scripted replies and tests run workflows that way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn

from memsearcher_jax.agent import protocol
from memsearcher_jax.types import Completion, Generate, Outcome, Prompt, Search, Workflow

MAX_REQUESTS = 100_000  # of one workflow, far above those of the longest stream


def checked(start: Callable[[Any], Workflow], problem: Any, tools: Sequence[str]) -> Workflow:
    """The problem's workflow, made when it is first resumed, of which every mistake is an error in the workflow.

    TypeError: a request that none of the `tools` answers, or a result that is no `Outcome`. RuntimeError: no end.
    """
    response = None
    if not isinstance(generator := start(problem), Generator):
        raise TypeError(f"start returns {generator!r:.200}, which is no generator")
    with contextlib.closing(generator) as workflow:
        for _ in range(MAX_REQUESTS):
            try:
                request = workflow.send(response)
            except StopIteration as end:
                if isinstance(end.value, Outcome):
                    return end.value
                raise TypeError(f"the workflow returns {end.value!r:.200}, which is no Outcome") from None
            if not isinstance(request, Generate | Search) and getattr(request, "tool", None) not in tools:
                known = ", ".join(tools) or "none: see agent.tools"
                _throw(workflow, TypeError(f"the workflow yields {request!r:.200}, and the run's tools are {known}"))
            response = yield request
        _throw(workflow, RuntimeError(f"the workflow does not end: it made {MAX_REQUESTS:,} requests"))


def _throw(workflow: Workflow, error: Exception) -> NoReturn:
    """Raises the error where the workflow yields, so that the traceback has the line."""
    workflow.throw(error)
    raise error


def run_workflow(
    workflow: Workflow, generate: Callable[[Generate], Completion], tools: Callable[[Any], Any]
) -> Outcome:
    """Answers every request of `workflow` until it returns: `tools` gets `Search` and `Call`. Exceptions propagate."""
    response = None
    while True:
        try:
            request = workflow.send(response)
        except StopIteration as end:
            return end.value
        response = generate(request) if isinstance(request, Generate) else tools(request)


def starts_turn(request: Generate) -> bool:
    """Whether the reply begins a turn; other replies rewrite the memory."""
    if isinstance(request.text, Prompt) or request.same_turn:
        return True
    return any(span.text.endswith(protocol.THINK) for span in request.text[-1:])  # () goes on without a text
