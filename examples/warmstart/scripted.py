"""Trajectories of a program in place of the model, such as a script or a teacher, in the token ids of the policy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from memsearcher_jax.agent.run import run_workflow
from memsearcher_jax.runtime.tokenizer import ChatTokenizer
from memsearcher_jax.types import (
    Completion,
    Context,
    Generate,
    Problem,
    Prompt,
    ToolResult,
    Trajectory,
    Workflow,
)


def scripted_trajectory(
    problem: Problem,
    workflow: Workflow,
    policy: Callable[[Generate], Completion],
    tools: Callable[[Any], Any],
    tokenizer: ChatTokenizer,
    rollout: int = 0,
) -> Trajectory:
    """Runs the workflow with a scripted policy. Contexts hold the ids that a sampler would; log-probabilities are 0."""
    contexts: list[list[tuple[int, bool]]] = []  # (id, sampled) by context

    def generate(request: Generate) -> Completion:
        if isinstance(request.text, Prompt):
            contexts.append([])
            ids = sum(tokenizer.prompt(request.text), ())
        elif not contexts:
            raise ValueError("a workflow must open a context with a Prompt before it adds text")
        else:
            ids = tokenizer.encode_spans(request.text)
        completion = policy(request)
        if request.same_turn and contexts[-1][-1][0] in tokenizer.stop_ids:
            contexts[-1].pop()
        found_stop = request.stop and re.search(request.stop, completion.text, re.DOTALL)
        reply = tokenizer.encode_untrusted(completion.text) if found_stop else encode_reply(tokenizer, completion.text)
        contexts[-1] += [*((id, False) for id in ids), *((id, True) for id in reply)]
        return completion

    results: list[ToolResult] = []

    def respond(request: Any) -> Any:
        response = tools(request)
        results.extend([response] if isinstance(response, ToolResult) else [])
        return response

    outcome = run_workflow(workflow, generate, respond)
    recorded = []
    for tokens in contexts:
        ids, sampled = zip(*tokens, strict=True)
        recorded.append(Context(ids, (0.0,) * len(ids), sampled))
    transcript = tokenizer.transcript(recorded[-1].ids) if recorded else ""
    return Trajectory(problem, rollout, outcome, tuple(recorded), transcript, tuple(results))


def encode_reply(tokenizer: ChatTokenizer, text: str) -> tuple[int, ...]:
    """The ids that a model samples for a reply, with the end of the turn."""
    return (*tokenizer.encode_untrusted(text), tokenizer.end_ids[0])
