"""Gives each trajectory its own tools: they are made before its workflow begins, and rewarded and closed at its end.

What they do is I/O, so a workflow asks for it as it asks for calls: `make` and `end` are calls of hidden tools.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from memsearcher_jax.agent.tool_functions import OwnedCall, OwnTools, Tool, ToolFactory, unbound
from memsearcher_jax.python_files import described
from memsearcher_jax.types import Call, Outcome, Problem, StopReason, TokenCounter, ToolResult, Workflow

log = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0  # in which coroutines have to close what they opened


def factories_of(tools: Sequence[Tool]) -> list[ToolFactory]:
    """What makes the tools that each trajectory has of its own, each once."""
    return list({id(tool.owner): tool.owner for tool in tools if tool.owner is not None}.values())


def lifecycle_tools(tools: Sequence[Tool]) -> list[Tool]:
    """The hidden tools that make and end what a trajectory has of its own, for the backends of a rollout."""
    hidden = []
    for factory in factories_of(tools):
        if factory.has_lifecycle:
            hidden += [Tool({"name": name}, unbound) for name in (_make_name(factory), _end_name(factory))]
    return hidden


def _make_name(factory: ToolFactory) -> str:
    return f"{factory.name} (made)"


def _end_name(factory: ToolFactory) -> str:
    return f"{factory.name} (ended)"


def with_own_tools(
    start: Callable[[Problem], Workflow], tools: Sequence[Tool], counter: TokenCounter, question_tokens: int
) -> Callable[[Problem], Workflow]:
    """The function that starts workflows, for workflows with tools of their own.

    What these say when they are made follows the question; both have at most `question_tokens` tokens.
    """
    factories = factories_of(tools)
    return partial(_owning, start, factories, counter, question_tokens) if factories else start


def _owning(
    start: Callable[[Problem], Workflow],
    factories: Sequence[ToolFactory],
    counter: TokenCounter,
    question_tokens: int,
    problem: Problem,
) -> Workflow:
    owned: list[OwnTools] = []
    try:
        instructions = []
        for factory in factories:
            own = factory.make(problem)
            owned.append(own)
            if not factory.has_lifecycle:
                continue
            made: ToolResult = yield _lifecycle_call(_make_name(factory), own.start)
            if made.error:
                return _lost(made)
            if made.text:
                instructions.append(made.text)
        if instructions:
            question = "\n\n".join([problem.question, *instructions])
            if (tokens := counter.count(question)) > question_tokens:
                error = f"the question with what its tools say has {tokens} tokens: raise agent.question_tokens"
                return Outcome(StopReason.FAULT, error=error)
            problem = replace(problem, question=question)
        bound = {name: tool for own in owned for name, tool in own.tools.items()}
        outcome = yield from _with_bound_calls(start(problem), bound)
        if not isinstance(outcome, Outcome) or outcome.stop.is_fault:
            return outcome
        total = None
        for factory, own in zip(factories, owned, strict=True):
            if not factory.has_lifecycle:
                continue
            ended: ToolResult = yield _lifecycle_call(_end_name(factory), partial(_reward_text, own))
            if ended.error:
                return replace(outcome, stop=StopReason.FAULT, error=ended.error)
            if ended.text:
                total = (total or 0.0) + float(ended.text)
        return replace(outcome, tool_reward=total)
    finally:
        # Also where the workflow is dropped. It may wait for something, as for a server.
        threading.Thread(target=_close, args=(owned,), daemon=True).start()


def _with_bound_calls(workflow: Workflow, bound: dict[str, Tool]) -> Generator[Any, Any, Any]:
    """The workflow, whose calls of its own tools say whose they are."""
    if not isinstance(workflow, Generator):
        raise TypeError(f"start returns {workflow!r:.200}, which is no generator")
    response = None
    with contextlib.closing(workflow):
        while True:
            try:
                request = workflow.send(response)
            except StopIteration as end:
                return end.value
            if isinstance(request, Call) and request.tool in bound:
                request = OwnedCall(request.tool, request.arguments, bound[request.tool])
            try:
                response = yield request
            except Exception as error:  # of the request: the traceback gets the line that made it
                with contextlib.suppress(StopIteration):
                    workflow.throw(error)
                raise


def _lifecycle_call(name: str, act: Callable[[float], str]) -> OwnedCall:
    return OwnedCall(name, {}, Tool({"name": name}, lambda calls, timeout: [act(timeout)]))


def _reward_text(own: OwnTools, timeout: float) -> str:
    reward = own.reward(timeout)
    return "" if reward is None else repr(float(reward))


def _lost(made: ToolResult) -> Outcome:
    stop = StopReason.SEARCH_FAILED if made.lost else StopReason.FAULT
    return Outcome(stop, error=f"{made.tool}: {made.error}")


def _close(owned: Sequence[OwnTools]) -> None:
    for own in owned:
        try:
            own.close(CLOSE_SECONDS)
        except Exception as error:
            # The trajectory is over, and its reward known.
            log.warning("agent.tools: closing what a trajectory had of its own failed: %s", described(error))
