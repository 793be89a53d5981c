"""The example of an agent, a tool and a reward of one's own: from scripted completions to training."""

from dataclasses import replace
from pathlib import Path

import pytest

from memsearcher_jax.agent.base import Scoring
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.registry import make_agent
from memsearcher_jax.agent.run import run_workflow
from memsearcher_jax.agent.tool_functions import file_tools
from memsearcher_jax.launch import tpu_train
from memsearcher_jax.logs.metrics import read_metrics
from memsearcher_jax.logs.trajectories import read_trajectories, step_path
from memsearcher_jax.rl.rewards import own_rewards
from memsearcher_jax.rl.tool_executor import respond, search_backend, tool_backends
from memsearcher_jax.types import Call, Passage, Problem, ScoredTrajectory, StopReason, Trajectory
from tests.support import SMALL_RUN, ScriptedPolicy, TinyIndex, byte_tokenizer

FILE = str(Path(__file__).parents[2] / "examples" / "my_agent.py")
PAGE = Passage("0", '"Tower Bridge"\nIt was opened in 1894.')
SEARCH = ' look</think><tool_call>{"name": "wikipedia_search", "arguments": {"query": "Tower Bridge"}}</tool_call>'
CALCULATE = ' age</think><tool_call>{"name": "calculate", "arguments": {"expression": "1969 - 1894"}}</tool_call>'
ANSWER = " done</think> \\boxed{75}"


def play(script, **settings):
    """The outcome on a script, and the policy that kept the requests."""
    policy, (tool,) = ScriptedPolicy(script), file_tools(FILE)
    agent = replace(make_agent(AgentConfig(workflow=FILE, **settings)), tools=(tool.schema,))
    backends = {"": search_backend(TinyIndex((PAGE,))), **tool_backends([tool])}
    workflow = agent.start(Problem("q", "How old was it in 1969?", ("75",)), byte_tokenizer())
    return run_workflow(workflow, policy, lambda request: respond(backends, request)), policy


def test_a_turn_searches_or_calculates_and_adds_a_note():
    notes = ["<memory> opened 1894 </memory>", "<memory> 75 years </memory>"]
    outcome, policy = play([SEARCH, notes[0], CALCULATE, notes[1], ANSWER])
    assert (outcome.stop, outcome.answer) == (StopReason.ANSWERED, "75")
    assert [turn.memory for turn in outcome.turns] == ["", "opened 1894", "opened 1894 75 years"]
    assert "1894" in outcome.turns[0].observation and "75" in outcome.turns[1].observation
    assert '"name": "calculate"' in policy.requests[0].text["prefix"], "the schema is part of the system message"
    outcome, _ = play([SEARCH, notes[0], CALCULATE, notes[1], ANSWER], memory_tokens=12)
    assert outcome.turns[-1].memory == "75 years", "the older note made room"


@pytest.mark.parametrize(
    ("expression", "text"),
    [("(1894 - 1869) / 5", "5.0"), ("-2 * 3", "-6"), ("1 +", "SyntaxError"), ("open('x')", "ValueError: open('x') is")],
)
def test_the_calculator_takes_arithmetic_alone(expression, text):
    (tool,) = file_tools(FILE)
    result = respond(tool_backends([tool]), Call("calculate", {"expression": expression}))
    assert (result.text or result.error).startswith(text)


def test_its_reward_prefers_short_trajectories_among_right_ones():
    problem, batch = Problem("q", "?", ("75",)), []
    for script in ([ANSWER], [SEARCH, "<memory> m </memory>", ANSWER], [SEARCH, "no memory"]):
        outcome, _ = play(script)
        batch.append(ScoredTrajectory(Trajectory(problem, 0, outcome, (), ""), 0.0))
    assert [round(one.reward, 2) for one in own_rewards(FILE, batch, Scoring(byte_tokenizer()))] == [0.98, 0.96, 0.0]


@pytest.mark.slow
def test_it_is_trained_on_the_synthetic_encyclopedia(tmp_path):
    own = f"--agent.workflow {FILE} --agent.tools {FILE} --reward.function {FILE}"
    own += " --agent.observation_tokens 128"  # the tool's schema takes their place in the context
    tpu_train.main([*SMALL_RUN.split(), *own.split(), "--out", str(tmp_path / "run")])
    assert [step["step"] for step in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1]
    trained = list(read_trajectories(step_path(tmp_path / "run", 1)))
    assert len(trained) == 8 and {one.reason for one in trained} == {"reward.function"}
