"""The MemSearcher workflow: the context of every turn holds the question and a memory, and nothing else.

A turn thinks, then either answers in a box, which ends the trajectory, or searches, reads the results and rewrites the
memory for the next turn. (MemSearcher, section 3.)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from memsearcher_jax.agent import protocol
from memsearcher_jax.agent.base import QuestionAgent
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.prompts import Prompts
from memsearcher_jax.agent.tools import run_tool_calls
from memsearcher_jax.types import FinishReason, Generate, Outcome, StopReason, TokenCounter, Turn, Workflow


def memsearcher(question: str, *, config: AgentConfig, prompts: Prompts, token_counter: TokenCounter) -> Workflow:
    """Yields `Generate` and `Search`, returns an `Outcome`. Does no I/O; no text of the policy makes it raise."""
    memory = ""
    turns: list[Turn] = []
    counts = Counter(
        calls_ignored=0, calls_clipped=0, passages_clipped=0, memory_tokens=0, memory_cuts=0, memory_tokens_cut=0
    )

    def outcome(stop: StopReason, *last: Turn, error: str = "") -> Outcome:
        return Outcome(stop, "", (*turns, *last), dict(counts), error)

    for _ in range(config.max_turns):
        completion = yield Generate(prompts.initial_prompt(question, memory), config.completion_tokens)
        turn = Turn(memory, completion.text)
        bodies = protocol.tool_calls(completion.text)
        if completion.finish is not FinishReason.STOP or not bodies:
            return protocol.ended(*protocol.final_answer(completion), turns, turn, counts)

        used = yield from run_tool_calls(turn, bodies, config=config, prompts=prompts, token_counter=token_counter)
        counts.update(used.counts)
        turn = used.turn
        if used.error and config.on_search_error == "stop":
            return outcome(StopReason.SEARCH_FAILED, turn, error=used.error)

        request = prompts.continuation(used.message, think=False)
        completion = yield Generate(request, config.max_rewrite_tokens, kind="memory")
        turn = replace(turn, rewrite=completion.text)
        if completion.finish is not FinishReason.STOP:
            return outcome(protocol.STOP_REASONS[completion.finish], turn)
        rewritten = protocol.memory(completion.text)
        if not rewritten:
            return outcome(StopReason.BAD_MEMORY, turn)
        memory = fit_memory(rewritten, config, token_counter, counts)
        turns.append(replace(turn, new_memory=memory))

    return outcome(StopReason.MAX_TURNS)


def fit_memory(written: str, config: AgentConfig, token_counter: TokenCounter, counts: Counter[str]) -> str:
    """The memory that the next context shows of the one that the policy wrote, and what was cut of it as counts."""
    if not config.carry_memory:
        written = ""
    excess = token_counter.count(written) - config.memory_tokens
    memory = token_counter.clip(written, config.memory_tokens)
    counts["memory_cuts"] += excess > 0
    counts["memory_tokens_cut"] += max(0, excess)
    counts["memory_tokens"] = token_counter.count(memory)
    return memory


class MemSearcher(QuestionAgent):
    """The agent of the paper."""

    workflow = staticmethod(memsearcher)
    searches = True
    calls_tools = True
    keeps_memory = True
    kinds = frozenset(("action", "memory"))

    def check(self) -> None:
        if self.config.max_rewrite_tokens <= self.config.memory_tokens:
            raise ValueError(
                f"agent.rewrite_tokens {self.config.rewrite_tokens} is not above agent.memory_tokens "
                f"{self.config.memory_tokens}: a rewrite would be cut off before its memory fills the budget; raise "
                "it, or set it to 0"
            )

    def context_budget(self) -> dict[str, int]:
        config = self.config
        return {
            "agent.question_tokens": config.question_tokens,
            "agent.observation_tokens": config.observation_tokens,
            "agent.memory_tokens": config.memory_tokens,
            "agent.completion_tokens": config.completion_tokens,
            "agent.rewrite_tokens": config.max_rewrite_tokens,
        }
