"""The agents by the value of `agent.workflow`: those that come with the package, or one in a file of a user's.

Imports neither JAX nor NumPy, so that commands can check their settings before they load them.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from memsearcher_jax.agent.base import Agent, QuestionAgent
from memsearcher_jax.agent.compact import Compact
from memsearcher_jax.agent.config import AgentConfig, RewardConfig
from memsearcher_jax.agent.harness import Harness
from memsearcher_jax.agent.mem1 import Mem1
from memsearcher_jax.agent.memagent import MemAgent
from memsearcher_jax.agent.memalpha.agent import Memalpha
from memsearcher_jax.agent.memalpha.config import MemalphaConfig
from memsearcher_jax.agent.memsearcher import MemSearcher
from memsearcher_jax.agent.react import ReAct
from memsearcher_jax.agent.search_r1 import SearchR1
from memsearcher_jax.agent.single_turn import Direct, Rag
from memsearcher_jax.python_files import described, load_named

AGENTS: dict[str, type[Agent]] = {
    "memsearcher": MemSearcher,
    "react": ReAct,
    "compact": Compact,
    "search_r1": SearchR1,
    "mem1": Mem1,
    "memagent": MemAgent,
    "direct": Direct,
    "rag": Rag,
    "memalpha": Memalpha,
}


def make_agent(
    config: AgentConfig, reward: RewardConfig | None = None, memalpha: MemalphaConfig | None = None
) -> Agent:
    """The agent that `config.workflow` names, or that of `config.harness`. Raises ValueError or OSError in one line."""
    found = Harness if config.harness else agent_class(config.workflow)
    try:
        return found(config, reward or RewardConfig(), memalpha or MemalphaConfig())
    except TypeError as error:  # an __init__ of a user's class
        raise ValueError(f"agent.workflow {config.workflow}: {described(error)}") from error


def agent_class(workflow: str) -> type[Agent]:
    """The class of a workflow: a name of `AGENTS`, or FILE.py. Raises ValueError or OSError in one line."""
    if not workflow.endswith(".py"):
        if workflow not in AGENTS:
            raise ValueError(f"agent.workflow is {workflow!r}: it must be one of {', '.join(AGENTS)}, or FILE.py")
        return AGENTS[workflow]
    found = load_named(workflow, "agent.workflow")
    if isinstance(found, type) and issubclass(found, Agent) and not inspect.isabstract(found):
        return found
    if inspect.isgeneratorfunction(found):
        if unknown := sorted(set(vars(found)) - {*dir(QuestionAgent), "__wrapped__"}):
            raise ValueError(f"agent.workflow {workflow}: {unknown[0]} is no member of an agent (docs/extend.md)")
        kinds = frozenset(("action", "memory"))  # it may name either
        members = {"workflow": staticmethod(found), "searches": True, "calls_tools": True, "kinds": kinds}
        return type(Path(workflow).stem, (FunctionAgent,), members | vars(found))
    raise ValueError(
        f"agent.workflow {workflow}: {Path(workflow).stem} must be a generator function, or a complete class that "
        "derives from QuestionAgent or Agent (docs/extend.md)"
    )


class FunctionAgent(QuestionAgent):
    """An agent that is a generator function. One with `keeps_memory` is taken to use `agent.memory_tokens`."""

    def context_budget(self) -> dict[str, int]:
        if not self.keeps_memory:
            return super().context_budget()
        config = self.config
        return {
            "agent.question_tokens": config.question_tokens,
            "agent.observation_tokens": config.observation_tokens,
            "agent.memory_tokens": config.memory_tokens,
            "agent.completion_tokens": config.completion_tokens,
            "agent.rewrite_tokens": config.max_rewrite_tokens,
        }
