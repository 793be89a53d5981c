"""Two baselines of one turn: `direct` answers from the policy's own knowledge, `rag` from one search for the question.

(Lewis et al., "Retrieval-Augmented Generation", 2020.)
"""

from __future__ import annotations

from memsearcher_jax.agent import protocol
from memsearcher_jax.agent.base import QuestionAgent
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.prompts import Prompts
from memsearcher_jax.agent.tools import fit_results
from memsearcher_jax.types import Generate, Outcome, Query, Search, StopReason, TokenCounter, Turn, Workflow


def direct(question: str, *, config: AgentConfig, prompts: Prompts, token_counter: TokenCounter) -> Workflow:
    """Yields one `Generate`, returns an `Outcome`. A tool call is not run and is not an answer."""
    completion = yield Generate(prompts.initial_prompt(question), config.completion_tokens)
    return protocol.ended(*protocol.final_answer(completion), (), Turn(memory="", reply=completion.text), {})


def rag(question: str, *, config: AgentConfig, prompts: Prompts, token_counter: TokenCounter) -> Workflow:
    """Yields one `Search` and one `Generate`, returns an `Outcome`.

    The passages are part of the first prompt and share `config.observation_tokens`.
    """
    query = Query(question, config.default_top_n)
    (result,) = yield Search((query,))
    if result.error and config.on_search_error == "stop":
        turn = Turn(memory="", reply="", queries=(query,), results=(result,))
        return Outcome(StopReason.SEARCH_FAILED, turns=(turn,), error=result.error)

    fitted = fit_results([""], [result], config.observation_tokens, prompts, token_counter)
    ((_, passages),) = fitted.pairs
    completion = yield Generate(prompts.initial_prompt(question, passages), config.completion_tokens)
    turn = Turn(memory="", reply=completion.text, queries=(query,), results=(result,), observation=passages)
    counts = {"passages_clipped": fitted.passages_clipped}
    return protocol.ended(*protocol.final_answer(completion), (), turn, counts)


class Direct(QuestionAgent):
    """The baseline without a search."""

    workflow = staticmethod(direct)
    templates = "direct"


class Rag(QuestionAgent):
    """The baseline that searches once, for the question."""

    workflow = staticmethod(rag)
    templates = "rag"
    searches = True
