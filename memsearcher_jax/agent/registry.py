"""The registry of workflows: how each is started, its template set and its longest context.

Imports neither JAX nor NumPy, so that commands can check their settings before loading them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from memsearcher_jax.agent import prompts as templates
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.memalpha import prompts as memalpha_templates
from memsearcher_jax.agent.memalpha.config import MemalphaConfig
from memsearcher_jax.agent.memalpha.prompts import MemalphaPrompts
from memsearcher_jax.agent.memalpha.workflow import memalpha
from memsearcher_jax.agent.memsearcher import memsearcher
from memsearcher_jax.agent.prompts import Prompts
from memsearcher_jax.agent.react import react
from memsearcher_jax.agent.reward import Parsed, parse_boxed
from memsearcher_jax.agent.search_r1 import SearchR1Prompts, parse_answer, search_r1
from memsearcher_jax.agent.single_turn import direct, rag
from memsearcher_jax.types import Problem, Prompt, TokenCounter, Workflow

AnyPrompts = Prompts | MemalphaPrompts


class PromptTokenizer(TokenCounter, Protocol):
    """A token counter that also encodes prompts."""

    def prompt(self, prompt: Prompt) -> Sequence[Sequence[int]]:
        """The ids of each segment; chat markup of trusted segments becomes special tokens."""
        ...


@dataclass(frozen=True)
class WorkflowSpec:
    """The interface of one workflow to the rest of the package."""

    workflow: Callable[..., Workflow]
    load_prompts: Callable[[AgentConfig], Any] = templates.load
    """Reads the template set. Raises FileNotFoundError or ValueError for one that does not fit the workflow."""
    parse_answer: Callable[[str], Parsed] = parse_boxed  # of a transcript, for the reward
    searches: bool = False
    keeps_memory: bool = False
    keeps_history: bool = False  # one context holds all turns
    reads_streams: bool = False  # problems are streams; otherwise questions

    def start(
        self,
        problem: Problem,
        agent: AgentConfig,
        memalpha: MemalphaConfig,
        prompts: AnyPrompts,
        token_counter: TokenCounter,
    ) -> Workflow:
        if not self.reads_streams:
            return self.workflow(problem.question, config=agent, prompts=prompts, token_counter=token_counter)
        assert problem.stream is not None, f"problem {problem.id} is not a stream"
        return self.workflow(problem.stream, agent=agent, config=memalpha, prompts=prompts, token_counter=token_counter)

    def template_tokens(self, agent: AgentConfig, prompts: AnyPrompts, tokenizer: PromptTokenizer) -> int:
        """Maximum tokens of template text in one context."""
        if isinstance(prompts, MemalphaPrompts):
            return sum(map(len, tokenizer.prompt(prompts.chunk_prompt("", ""))))
        return prompts.template_tokens(agent.max_calls, tokenizer)

    def context_budget(self, agent: AgentConfig, memalpha: MemalphaConfig) -> dict[str, int]:
        """Maximum tokens of everything else in one context, by the setting that limits it."""
        if self.reads_streams:
            return {
                "agent.memory_tokens": agent.memory_tokens,
                "memalpha.chunk_tokens": memalpha.chunk_tokens,
                "agent.completion_tokens": agent.completion_tokens,
            }
        budget = {"agent.question_tokens": agent.question_tokens, "agent.observation_tokens": agent.observation_tokens}
        if not self.keeps_memory:
            return budget | {"2 x agent.completion_tokens": 2 * agent.completion_tokens}
        return budget | {
            "agent.memory_tokens": agent.memory_tokens,
            "agent.completion_tokens": agent.completion_tokens,
            "agent.rewrite_tokens": agent.max_rewrite_tokens,
        }

    def longest_context(self, agent: AgentConfig, memalpha: MemalphaConfig, template_tokens: int) -> int:
        """Maximum tokens of one context."""
        return sum(self.context_budget(agent, memalpha).values()) + template_tokens

    @property
    def synthetic_data(self) -> str:
        """The value of `data.synthetic` that makes problems for this workflow."""
        return "streams" if self.reads_streams else "encyclopedia"

    def check_context(
        self, agent: AgentConfig, memalpha: MemalphaConfig, context_tokens: int, *, template_tokens: int | None = None
    ) -> None:
        """Raises ValueError unless the longest context fits `context_tokens`.

        Omit `template_tokens` while they are unknown; they then count as one token.
        """
        if self.reads_streams and memalpha.core_tokens >= agent.memory_tokens:
            raise ValueError(
                f"memalpha.core_tokens {memalpha.core_tokens} is not below agent.memory_tokens {agent.memory_tokens}: "
                "a context shows the complete core and the latest items after it"
            )
        if not self.reads_streams and self.keeps_memory and agent.max_rewrite_tokens <= agent.memory_tokens:
            raise ValueError(
                f"agent.rewrite_tokens {agent.rewrite_tokens} is not above agent.memory_tokens {agent.memory_tokens}: "
                "a rewrite would be cut off before its memory fills the budget; raise it, or set it to 0"
            )
        budget = self.context_budget(agent, memalpha)
        needed = self.longest_context(agent, memalpha, 1 if template_tokens is None else template_tokens)
        if needed > context_tokens:
            budget = {"templates": template_tokens or "at least 1", **budget}
            parts = ", ".join(f"{name} {tokens}" for name, tokens in budget.items())
            raise ValueError(
                f"a context may need {needed} tokens ({parts}), but sampling.context_tokens is {context_tokens}: "
                "raise it or lower one of these"
            )


WORKFLOWS = {
    "memsearcher": WorkflowSpec(memsearcher, searches=True, keeps_memory=True),
    "react": WorkflowSpec(react, searches=True, keeps_history=True),
    "search_r1": WorkflowSpec(
        search_r1,
        partial(templates.load, kind=SearchR1Prompts),
        parse_answer,
        searches=True,
        keeps_history=True,
    ),
    "direct": WorkflowSpec(direct),
    "rag": WorkflowSpec(rag, searches=True),
    "memalpha": WorkflowSpec(memalpha, memalpha_templates.load, keeps_memory=True, reads_streams=True),
}
"""Every workflow, by the value of `agent.workflow`."""
