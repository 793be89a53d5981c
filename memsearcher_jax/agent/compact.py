"""The compact workflow: the history of ReAct, which the policy summarises when it is too long.

A context begins with the question and the summary, and grows by replies and search results. Once these have more than
`agent.history_tokens`, or the next text would not fit, the policy writes a summary of at most `agent.memory_tokens`,
and the next context begins. Without a limit this is ReAct; with 0 it is MemSearcher, which summarises in every turn.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from memsearcher_jax.agent import protocol
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.memsearcher import MemSearcher, fit_memory
from memsearcher_jax.agent.prompts import Prompts, fill
from memsearcher_jax.agent.tools import run_tool_calls
from memsearcher_jax.types import (
    FinishReason,
    Generate,
    Outcome,
    Prompt,
    StopReason,
    TextSpan,
    TokenCounter,
    Turn,
    Workflow,
)


@dataclass(frozen=True)
class CompactPrompts(Prompts):
    """A template set of this workflow."""

    summary: tuple[str, ...] = ("",)  # the order to summarise, after the results in their message

    def next_prompt(self, question: str, memory: str, results: str) -> Prompt:
        """A fresh context, which also shows results that did not fit the context before."""
        if not results:
            return self.initial_prompt(question, memory)
        turn = (*self.turn[:-1], f"{self.turn[-1]}\n\n", "")
        return fill((self.system,), turn, {"question": question, "memory": memory, "results": results}, self.opening)

    def order_summary(self, message: tuple[TextSpan, ...] = ()) -> tuple[TextSpan, ...]:
        """The text that asks for a summary, after the results in `message` if there are any."""
        return self.continuation((*message, TextSpan(f"\n{self.summary[0]}", True)), think=False)

    def order_tokens(self, token_counter: TokenCounter) -> int:
        return sum(token_counter.count(span.text) for span in self.order_summary())

    def template_tokens(self, calls: int, token_counter: TokenCounter) -> int:
        return super().template_tokens(calls, token_counter) + self.order_tokens(token_counter)


def compact(question: str, *, config: AgentConfig, prompts: CompactPrompts, token_counter: TokenCounter) -> Workflow:
    """Yields `Generate` and `Search`, returns an `Outcome`. A tool call in the last turn is not run."""
    memory = ""
    turns: list[Turn] = []
    counts = Counter(calls_ignored=0, calls_clipped=0, passages_clipped=0, compactions=0)
    counts.update(memory_tokens=0, memory_cuts=0, memory_tokens_cut=0)
    # A reply must leave room for the order to summarise, and for the summary.
    limit = config.max_rewrite_tokens
    room = config.completion_tokens + prompts.order_tokens(token_counter) + limit
    completion = yield Generate(prompts.initial_prompt(question), config.completion_tokens, room=room)
    history_tokens = 0
    while True:
        turn = Turn(memory, completion.text)
        bodies = protocol.tool_calls(completion.text)
        if completion.finish is not FinishReason.STOP or not bodies:
            return protocol.ended(*protocol.final_answer(completion), turns, turn, counts)
        if len(turns) + 1 == config.max_turns:
            return Outcome(StopReason.MAX_TURNS, turns=(*turns, turn), counts=dict(counts))
        used = yield from run_tool_calls(turn, bodies, config=config, prompts=prompts, token_counter=token_counter)
        counts.update(used.counts)
        turn = used.turn
        if used.error and config.on_search_error == "stop":
            return Outcome(StopReason.SEARCH_FAILED, "", (*turns, turn), dict(counts), used.error)
        text = prompts.continuation(used.message, think=True)
        history_tokens += token_counter.count(completion.text)
        history_tokens += sum(token_counter.count(span.text) for span in text)
        if history_tokens <= config.history_tokens:
            completion = yield Generate(text, config.completion_tokens, room=room)
            if completion.finish is not FinishReason.CONTEXT_FULL:
                turns.append(turn)
                continue

        completion = yield Generate(prompts.order_summary(used.message), limit, kind="memory", room=limit)
        results = ""
        if completion.finish is FinishReason.CONTEXT_FULL:  # the next context shows the results
            completion = yield Generate(prompts.order_summary(), limit, kind="memory", room=limit)
            results = turn.observation
        turn = replace(turn, rewrite=completion.text)
        written = protocol.memory(completion.text)
        if completion.finish is not FinishReason.STOP or not written:
            stop = protocol.STOP_REASONS.get(completion.finish, StopReason.BAD_MEMORY)
            return Outcome(stop, turns=(*turns, turn), counts=dict(counts))
        memory = fit_memory(written, config, token_counter, counts)
        counts["compactions"] += 1
        turns.append(replace(turn, new_memory=memory))
        history_tokens = 0
        text = prompts.next_prompt(question, memory, results)
        completion = yield Generate(text, config.completion_tokens, room=room)


class Compact(MemSearcher):
    """The agent that keeps its history until it summarises it, with the budgets of MemSearcher."""

    workflow = staticmethod(compact)
    templates = "compact"
    prompt_set = CompactPrompts
