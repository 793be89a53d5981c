"""The ReAct workflow: one context that keeps the complete history and grows until it answers or is full.

It has MemSearcher's tools and tags but no memory: search results stay in the context, and the next thought follows
them. (Yao et al., "ReAct", 2022.)
"""

from __future__ import annotations

from collections import Counter

from memsearcher_jax.agent import protocol
from memsearcher_jax.agent.base import QuestionAgent
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.prompts import Prompts
from memsearcher_jax.agent.tools import run_tool_calls
from memsearcher_jax.types import FinishReason, Generate, Outcome, StopReason, TokenCounter, Turn, Workflow


def react(question: str, *, config: AgentConfig, prompts: Prompts, token_counter: TokenCounter) -> Workflow:
    """Yields `Generate` and `Search`, returns an `Outcome`. A tool call in the last turn is not run."""
    turns: list[Turn] = []
    counts = Counter(calls_ignored=0, calls_clipped=0, passages_clipped=0)
    text = prompts.initial_prompt(question)
    while True:
        completion = yield Generate(text, config.completion_tokens)
        turn = Turn(memory="", reply=completion.text)
        bodies = protocol.tool_calls(completion.text)
        if completion.finish is not FinishReason.STOP or not bodies:
            return protocol.ended(*protocol.final_answer(completion), turns, turn, counts)
        if len(turns) + 1 == config.max_turns:
            return Outcome(StopReason.MAX_TURNS, turns=(*turns, turn), counts=dict(counts))

        used = yield from run_tool_calls(turn, bodies, config=config, prompts=prompts, token_counter=token_counter)
        counts.update(used.counts)
        turns.append(used.turn)
        if used.error and config.on_search_error == "stop":
            return Outcome(StopReason.SEARCH_FAILED, "", tuple(turns), dict(counts), used.error)
        text = prompts.continuation(used.message, think=True)


class ReAct(QuestionAgent):
    """The baseline that keeps its history."""

    workflow = staticmethod(react)
    templates = "react"
    searches = True
    calls_tools = True
    has_one_context = True
