"""The agents that come with the package, by the value of `agent.workflow`.

Imports neither JAX nor NumPy, so that commands can check their settings before they load them.
"""

from __future__ import annotations

from memsearcher_jax.agent.base import Agent
from memsearcher_jax.agent.config import AgentConfig, RewardConfig
from memsearcher_jax.agent.memalpha.agent import Memalpha
from memsearcher_jax.agent.memalpha.config import MemalphaConfig
from memsearcher_jax.agent.memsearcher import MemSearcher
from memsearcher_jax.agent.react import ReAct
from memsearcher_jax.agent.search_r1 import SearchR1
from memsearcher_jax.agent.single_turn import Direct, Rag

AGENTS: dict[str, type[Agent]] = {
    "memsearcher": MemSearcher,
    "react": ReAct,
    "search_r1": SearchR1,
    "direct": Direct,
    "rag": Rag,
    "memalpha": Memalpha,
}


def make_agent(
    config: AgentConfig, reward: RewardConfig | None = None, memalpha: MemalphaConfig | None = None
) -> Agent:
    """The agent that `config.workflow` names."""
    return AGENTS[config.workflow](config, reward or RewardConfig(), memalpha or MemalphaConfig())
