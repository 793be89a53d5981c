"""Plays one workflow by plain calls: for a person at a keyboard, for scripted replies, for tests."""

from __future__ import annotations

from collections.abc import Callable

from memsearcher_jax.agent.types import Find, Found, Outcome, Reply, Say, Workflow


def play(workflow: Workflow, speak: Callable[[Say], Reply], find: Callable[[Find], tuple[Found, ...]]) -> Outcome:
    """Answers every request of `workflow` until it returns; what `speak` or `find` raise passes through."""
    answer = None
    while True:
        try:
            request = workflow.send(answer)
        except StopIteration as end:
            return end.value
        answer = speak(request) if isinstance(request, Say) else find(request)
