"""The MEM1 workflow: one internal state that every turn rewrites, and nothing else of earlier turns (arXiv 2506.15841).

A turn's context holds the question, the state of the turn before with its search, and what that found. The policy
writes the next state, a thought that also is its memory, and searches or answers; then the older state is dropped. Tags
are those of Search-R1, as in the authors' code, where a state is a `<think>`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from memsearcher_jax.agent import protocol
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.search_r1 import END_OF_ACTION, SearchR1, SearchR1Prompts, read_action, run_query
from memsearcher_jax.types import Generate, Outcome, Prompt, StopReason, TextSpan, TokenCounter, Turn, Workflow


class Mem1Prompts(SearchR1Prompts):
    """A template set of this protocol: that of Search-R1, whose reply continues after the state."""

    def initial_prompt(self, question: str, memory: str = "") -> Prompt:
        return Prompt((*super().initial_prompt(question).segments, TextSpan(memory, False, "memory")))


def mem1(question: str, *, config: AgentConfig, prompts: Mem1Prompts, token_counter: TokenCounter) -> Workflow:
    """Yields `Generate` and `Search`, returns an `Outcome`. A search in the last turn is not run."""
    state = ""
    turns: list[Turn] = []
    counts = Counter(invalid_actions=0, passages_clipped=0, memory_tokens=0)
    while True:
        prompt = prompts.initial_prompt(question, state)
        completion = yield Generate(prompt, config.completion_tokens, END_OF_ACTION, kind="memory")
        action = read_action(completion, len(turns) + 1 == config.max_turns, counts)
        turn = Turn(state, completion.text)
        if action.stop:
            return protocol.ended(action.stop, action.answer, turns, turn, counts)
        used = yield from run_query(action.query, turn, config=config, prompts=prompts, token_counter=token_counter)
        counts.update(used.counts)
        if used.error and config.on_search_error == "stop":
            return Outcome(StopReason.SEARCH_FAILED, "", (*turns, used.turn), dict(counts), used.error)
        state = completion.text + used.turn.observation
        counts["memory_tokens"] = token_counter.count(completion.text)
        turns.append(replace(used.turn, new_memory=completion.text))


class Mem1(SearchR1):
    """The agent of MEM1, whose answers are those of Search-R1."""

    workflow = staticmethod(mem1)
    templates = "mem1"
    has_one_context = False
    keeps_memory = True
    kinds = frozenset(("memory",))
    prompt_set = Mem1Prompts
