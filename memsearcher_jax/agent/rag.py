"""The retrieve-then-read baseline: one search with the question itself, then one reply from what it brought.

(Lewis et al., "Retrieval-Augmented Generation", 2020.) The passages stand in the opening message.
"""

from __future__ import annotations

from memsearcher_jax.agent.direct import only_reply
from memsearcher_jax.agent.prompts import Prompts
from memsearcher_jax.agent.tools import fit_results
from memsearcher_jax.agent.types import AgentConfig, Find, Outcome, Query, Ruler, Say, Stop, Turn, Workflow


def rag(question: str, *, config: AgentConfig, prompts: Prompts, ruler: Ruler) -> Workflow:
    """Yields one `Find` and one `Say`, returns an `Outcome`. The passages share `config.observation_tokens`."""
    query = Query(question, config.default_top_n)
    (found,) = yield Find((query,))
    searched = Turn(memory="", reply="", queries=(query,), found=(found,))
    if found.error and config.on_search_error == "stop":
        return Outcome(Stop.SEARCH_FAILED, turns=(searched,), error=found.error)

    ((_, shown),), counts = fit_results([""], [found], config.observation_tokens, prompts, ruler)
    reply = yield Say(prompts.opening(question, shown), config.reply_tokens)
    turn = Turn(memory="", reply=reply.text, queries=(query,), found=(found,), observation=shown)
    return only_reply(reply, turn, {"passages_clipped": counts["passages_clipped"]})
