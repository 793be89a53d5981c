"""The ReAct workflow: one context that keeps the whole history and grows until it answers or is full.

The same tools and tags as MemSearcher, without a memory: what a search brings back stays in the context, and the next
thought follows it. (Yao et al., "ReAct", 2022.)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from memsearcher_jax.agent import protocol
from memsearcher_jax.agent.memsearcher import STOP_AFTER
from memsearcher_jax.agent.prompts import Prompts
from memsearcher_jax.agent.tools import use_tools
from memsearcher_jax.agent.types import AgentConfig, Finish, Outcome, Ruler, Say, Stop, Turn, Workflow


def react(question: str, *, config: AgentConfig, prompts: Prompts, ruler: Ruler) -> Workflow:
    """Yields `Say` and `Find`, returns an `Outcome`. A tool call in the last turn is not run: nobody would read it."""
    turns: list[Turn] = []
    counts = Counter(calls_ignored=0, calls_clipped=0, passages_clipped=0)

    def ended(stop: Stop, turn: Turn | None = None, *, answer: str = "", error: str = "") -> Outcome:
        return Outcome(stop, answer, (*turns, turn) if turn else tuple(turns), dict(counts), error)

    text = prompts.opening(question)
    while True:
        reply = yield Say(text, config.reply_tokens)
        if reply.finish is Finish.NO_ROOM:
            return ended(Stop.CONTEXT_FULL)
        turn = Turn(memory="", reply=reply.text)
        if reply.finish in STOP_AFTER:
            return ended(STOP_AFTER[reply.finish], turn)

        bodies = protocol.tool_calls(reply.text)
        if not bodies:
            answer = protocol.boxed_answer(protocol.THINK + reply.text)
            return ended(Stop.NO_ANSWER, turn) if answer is None else ended(Stop.ANSWERED, turn, answer=answer)
        if len(turns) + 1 == config.max_turns:
            return ended(Stop.MAX_TURNS, turn)

        used = yield from use_tools(bodies, config=config, prompts=prompts, ruler=ruler)
        counts.update(used.counts)
        turn = replace(turn, calls=used.calls, queries=used.queries, found=used.found, observation=used.observation)
        if used.error and config.on_search_error == "stop":
            return ended(Stop.SEARCH_FAILED, turn, error=used.error)
        turns.append(turn)
        text = prompts.extension(used.message, think=True)
