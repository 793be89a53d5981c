"""The direct baseline: one reply from what the policy knows by itself, without a search."""

from __future__ import annotations

from collections.abc import Mapping

from memsearcher_jax.agent import protocol
from memsearcher_jax.agent.memsearcher import STOP_AFTER
from memsearcher_jax.agent.prompts import Prompts
from memsearcher_jax.agent.types import AgentConfig, Finish, Outcome, Reply, Ruler, Say, Stop, Turn, Workflow


def direct(question: str, *, config: AgentConfig, prompts: Prompts, ruler: Ruler) -> Workflow:
    """Yields one `Say`, returns an `Outcome`. A tool call is not run: there is no tool, and it is no answer."""
    reply = yield Say(prompts.opening(question), config.reply_tokens)
    return only_reply(reply, Turn(memory="", reply=reply.text), {})


def only_reply(reply: Reply, turn: Turn, counts: Mapping[str, int]) -> Outcome:
    """The outcome of a trajectory that has one turn and no way to go on."""
    if reply.finish is Finish.NO_ROOM:
        return Outcome(Stop.CONTEXT_FULL, counts=dict(counts))
    stop, answer = STOP_AFTER.get(reply.finish), None
    if stop is None:
        answer = protocol.boxed_answer(protocol.THINK + reply.text)
        stop = Stop.NO_ANSWER if answer is None else Stop.ANSWERED
    return Outcome(stop, answer or "", (turn,), dict(counts))
