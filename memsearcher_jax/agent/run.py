"""Runs one workflow with plain function calls: for a person at a keyboard, for scripted replies, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memsearcher_jax.agent import protocol
from memsearcher_jax.types import Completion, Generate, Outcome, Prompt, Workflow


def run_workflow(
    workflow: Workflow,
    generate: Callable[[Generate], Completion],
    tools: Callable[[Any], Any],
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
    return isinstance(request.text, Prompt) or request.same_turn or request.text[-1].text.endswith(protocol.THINK)
