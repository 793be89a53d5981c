"""The MemSearcher workflow: the context of every turn holds the question and a memory, and nothing else.

A turn thinks, then either answers in a box, which ends the trajectory, or searches, reads the results and rewrites the
memory for the next turn. (MemSearcher, section 3.)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from memsearcher_jax.agent import protocol
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.prompts import Prompts
from memsearcher_jax.agent.tools import run_tool_calls
from memsearcher_jax.types import FinishReason, Generate, Outcome, StopReason, TokenCounter, Turn, Workflow


@dataclass(frozen=True)
class BoundedMemory:
    """A text of at most `budget` tokens, and counts of what was cut."""

    budget: int
    text: str = ""
    tokens: int = 0  # of `text`
    cuts: int = 0  # rewrites that were over the budget
    tokens_cut: int = 0  # tokens over the budget, summed over rewrites

    def rewrite(self, text: str, token_counter: TokenCounter) -> BoundedMemory:
        """A memory that holds `text` instead, cut at the budget."""
        tokens = token_counter.count(text)
        excess = tokens - self.budget
        if excess <= 0:
            return replace(self, text=text, tokens=tokens)
        text = token_counter.clip(text, self.budget)
        tokens = token_counter.count(text)
        return BoundedMemory(self.budget, text, tokens, self.cuts + 1, self.tokens_cut + excess)


def memsearcher(question: str, *, config: AgentConfig, prompts: Prompts, token_counter: TokenCounter) -> Workflow:
    """Yields `Generate` and `Search`, returns an `Outcome`. Does no I/O; no text of the policy makes it raise."""
    memory = BoundedMemory(config.memory_tokens)
    turns: list[Turn] = []
    counts = Counter(calls_ignored=0, calls_clipped=0, passages_clipped=0)

    def outcome(stop: StopReason, *last: Turn, answer: str = "", error: str = "") -> Outcome:
        sizes = {"memory_tokens": memory.tokens, "memory_cuts": memory.cuts, "memory_tokens_cut": memory.tokens_cut}
        return Outcome(stop, answer, (*turns, *last), {**counts, **sizes}, error)

    for _ in range(config.max_turns):
        completion = yield Generate(prompts.initial_prompt(question, memory.text), config.completion_tokens)
        if completion.finish is FinishReason.CONTEXT_FULL:
            return outcome(StopReason.CONTEXT_FULL)
        turn = Turn(memory.text, completion.text)
        bodies = protocol.tool_calls(completion.text)
        if completion.finish is not FinishReason.STOP or not bodies:
            stop, answer = protocol.final_answer(completion)
            return outcome(stop, turn, answer=answer)

        used = yield from run_tool_calls(bodies, config=config, prompts=prompts, token_counter=token_counter)
        counts.update(used.counts)
        turn = used.add_to(turn)
        if used.error and config.on_search_error == "stop":
            return outcome(StopReason.SEARCH_FAILED, turn, error=used.error)

        completion = yield Generate(prompts.continuation(used.message, think=False), config.max_rewrite_tokens)
        turn = replace(turn, rewrite=completion.text)
        if completion.finish is not FinishReason.STOP:
            return outcome(protocol.STOP_REASONS[completion.finish], turn)
        rewritten = protocol.memory(completion.text)
        if not rewritten:
            return outcome(StopReason.BAD_MEMORY, turn)
        memory = memory.rewrite(rewritten if config.carry_memory else "", token_counter)
        turns.append(replace(turn, new_memory=memory.text))

    return outcome(StopReason.MAX_TURNS)
