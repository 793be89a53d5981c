"""The MemSearcher workflow: every turn is a fresh context that knows the question and a memory, nothing else.

A turn thinks and either answers in a box, which ends the trajectory, or searches, reads what came back and rewrites
the memory for the next turn. (MemSearcher, section 3.)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from memsearcher_jax.agent import protocol
from memsearcher_jax.agent.memory import Memory
from memsearcher_jax.agent.prompts import Prompts
from memsearcher_jax.agent.tools import use_tools
from memsearcher_jax.agent.types import AgentConfig, Finish, Outcome, Ruler, Say, Stop, Turn, Workflow

STOP_AFTER = {
    Finish.LENGTH: Stop.CUT_OFF,
    Finish.MARKUP: Stop.FORGED_TURN,
    Finish.NO_ROOM: Stop.CONTEXT_FULL,
}
"""Generations that end the trajectory, whatever they said."""


def memsearcher(question: str, *, config: AgentConfig, prompts: Prompts, ruler: Ruler) -> Workflow:
    """Yields `Say` and `Find`, returns an `Outcome`. Does no I/O; raises nothing, whatever the policy says."""
    memory = Memory(config.memory_tokens)
    turns: list[Turn] = []
    counts = Counter(calls_ignored=0, calls_clipped=0, passages_clipped=0)

    def ended(stop: Stop, turn: Turn | None = None, *, answer: str = "", error: str = "") -> Outcome:
        done = (*turns, turn) if turn else tuple(turns)
        kept = {"memory_tokens": memory.tokens, "memory_cuts": memory.cuts, "memory_tokens_cut": memory.tokens_cut}
        return Outcome(stop, answer, done, {**counts, **kept}, error)

    for _ in range(config.max_turns):
        reply = yield Say(prompts.opening(question, memory.text), config.reply_tokens)
        if reply.finish is Finish.NO_ROOM:
            return ended(Stop.CONTEXT_FULL)
        turn = Turn(memory.text, reply.text)
        if reply.finish in STOP_AFTER:
            return ended(STOP_AFTER[reply.finish], turn)

        bodies = protocol.tool_calls(reply.text)
        if not bodies:
            answer = protocol.boxed_answer(protocol.THINK + reply.text)
            return ended(Stop.NO_ANSWER, turn) if answer is None else ended(Stop.ANSWERED, turn, answer=answer)

        used = yield from use_tools(bodies, config=config, prompts=prompts, ruler=ruler)
        counts.update(used.counts)
        turn = replace(turn, calls=used.calls, queries=used.queries, found=used.found, observation=used.observation)
        if used.error and config.on_search_error == "stop":
            return ended(Stop.SEARCH_FAILED, turn, error=used.error)

        reply = yield Say(prompts.extension(used.message, think=False), config.reply_tokens)
        turn = replace(turn, rewrite=reply.text)
        if reply.finish in STOP_AFTER:
            return ended(STOP_AFTER[reply.finish], turn)

        rewritten = protocol.memory(reply.text)
        if not rewritten:
            return ended(Stop.BAD_MEMORY, turn)
        memory = memory.rewrite(rewritten if config.remember else "", ruler)
        turns.append(replace(turn, new_memory=memory.text))

    return ended(Stop.MAX_TURNS)
