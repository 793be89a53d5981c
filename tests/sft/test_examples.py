"""Scripted trajectories where nothing goes as the script expects."""

from memsearcher_jax.agent import prompts
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.single_turn import rag
from memsearcher_jax.sft.examples import scripted_trajectory
from memsearcher_jax.sft.question_demonstrator import QuestionDemonstrator
from memsearcher_jax.types import Problem, StopReason
from tests.support import byte_tokenizer


def test_a_workflow_may_end_before_its_first_context():
    agent, tokenizer, problem = AgentConfig(workflow="rag", prompts="rag"), byte_tokenizer(), Problem("q", "Who?", ())
    workflow = rag("Who?", config=agent, prompts=prompts.load(agent), token_counter=tokenizer)
    ended = scripted_trajectory(problem, workflow, QuestionDemonstrator(problem), None, tokenizer)
    assert (ended.outcome.stop, ended.contexts, ended.transcript) == (StopReason.SEARCH_FAILED, (), "")
