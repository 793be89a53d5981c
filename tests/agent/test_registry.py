"""The registry of workflows: names, prompt widths, and the check of the longest context."""

import typing

import pytest

from memsearcher_jax.agent.config import AgentConfig, WorkflowName
from memsearcher_jax.agent.memalpha.config import MemalphaConfig
from memsearcher_jax.agent.prompts import TEMPLATE_SLOTS
from memsearcher_jax.agent.registry import WORKFLOWS, WorkflowSpec

SETTINGS = dict(question_tokens=10, memory_tokens=20, observation_tokens=30, completion_tokens=40)


def agent_config(name: str, **settings) -> AgentConfig:
    return AgentConfig(workflow=name, prompts=name, **SETTINGS | settings)


def test_workflows_settings_and_templates_name_the_same_workflows():
    assert tuple(WORKFLOWS) == typing.get_args(WorkflowName) == tuple(TEMPLATE_SLOTS)


@pytest.mark.parametrize(
    ("name", "needed"),
    [("memsearcher", 140), ("react", 120), ("search_r1", 120), ("direct", 120), ("rag", 120), ("memalpha", 110)],
)
def test_the_longest_context_has_to_fit(name, needed, token_counter):
    spec, agent, memalpha = WORKFLOWS[name], agent_config(name), MemalphaConfig(chunk_tokens=50, core_tokens=10)
    spec.check_context(agent, memalpha, needed + 1)
    with pytest.raises(ValueError, match=rf"may need {needed + 1} tokens \(templates at least 1, .*context_tokens is"):
        spec.check_context(agent, memalpha, needed)
    template_tokens = spec.template_tokens(agent, spec.load_prompts(agent), token_counter)
    spec.check_context(agent, memalpha, needed + template_tokens, template_tokens=template_tokens)
    with pytest.raises(ValueError, match=rf"may need {needed + template_tokens} tokens \(templates {template_tokens}"):
        spec.check_context(agent, memalpha, needed + template_tokens - 1, template_tokens=template_tokens)


def test_the_core_has_to_leave_room_for_items():
    spec: WorkflowSpec = WORKFLOWS["memalpha"]
    with pytest.raises(ValueError, match=r"memalpha.core_tokens 20 is not below agent.memory_tokens 20"):
        spec.check_context(agent_config("memalpha"), MemalphaConfig(core_tokens=20), 1_000_000)
