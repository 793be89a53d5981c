"""Tries an agent or a reward of a user's on one problem, with scripted replies, before long work starts."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from memsearcher_jax.agent.base import Agent, Scoring
from memsearcher_jax.agent.prompts import ASSISTANT
from memsearcher_jax.agent.run import checked, run_workflow
from memsearcher_jax.agent.tool_functions import file_tools
from memsearcher_jax.config import RunConfig, agent_of
from memsearcher_jax.data.problems import make_problems
from memsearcher_jax.python_files import described
from memsearcher_jax.rl.batch import make_rollout_batch
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.rl.metrics import RolloutStats, trajectory_metrics
from memsearcher_jax.rl.rewards import agent_rewards, own_rewards
from memsearcher_jax.rl.toolbox import MCP
from memsearcher_jax.runs.run_dir import PACKAGED_TOKENIZER
from memsearcher_jax.tokenizer import ChatTokenizer
from memsearcher_jax.types import (
    Completion,
    Context,
    Generate,
    Passage,
    Problem,
    Prompt,
    ScoredTrajectory,
    Search,
    SearchResult,
    TokenCounter,
    ToolResult,
    Trajectory,
)

SECONDS = 20.0  # after which a workflow does not end
REPLY = "an attempt</think> <memory> nothing </memory> \\boxed{attempt}"


def probe_files(config: RunConfig) -> None:
    """Tries an agent or a reward in a file on a synthetic problem, unless a server or a run has its tools.

    Raises ValueError with one line that names file and line of a mistake.
    """
    agent, files = agent_of(config), [name for name in config.agent.tools if not name.startswith(MCP)]
    is_own = config.has_own_agent or config.reward.function
    if not is_own or config.agent.replay or files != list(config.agent.tools):
        return
    tools = tuple(tool.schema for name in files for tool in file_tools(name))
    problems = make_problems(replace(config.data, synthetic=agent.synthetic_data))
    probe(replace(agent, tools=tools), ChatTokenizer.load(PACKAGED_TOKENIZER), problems["train"][0])


def probe(agent: Agent, counter: TokenCounter, problem: Problem) -> None:
    """Raises ValueError with one line that names file and line of a mistake in the agent's or the reward's file."""
    file, ended = str(Path(agent.config.workflow).absolute()), list[Trajectory | BaseException]()

    def attempt() -> None:
        try:
            ended.append(_trajectory(agent, counter, problem))
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(SECONDS)
    if not ended:
        frame = sys._current_frames().get(thread.ident or 0)
        while frame is not None and frame.f_code.co_filename != file:
            frame = frame.f_back
        line = f", line {frame.f_lineno}" if frame else ""
        raise ValueError(f"agent.workflow {file}{line}: the workflow does not end: no result in {SECONDS:g} s")
    (trajectory,) = ended
    if isinstance(trajectory, BaseException):
        raise ValueError(f"agent.workflow {file}: {described(trajectory)}") from trajectory
    group = [replace(trajectory, rollout=rollout) for rollout in range(2)]
    tried = [(f"agent.workflow {file}", agent_rewards(agent, group, Scoring(counter)))] * (not agent.needs_completers)
    if function := agent.reward.function:
        rewarded = own_rewards(function, [ScoredTrajectory(one, 0.0) for one in group])
        tried += [(f"reward.function {function}", rewarded)]
    for named, scored in tried:
        for one in scored:
            if one.trajectory.outcome.stop is not trajectory.outcome.stop:
                raise ValueError(f"{named}: {one.trajectory.outcome.error}")
        try:
            metrics = trajectory_metrics(make_rollout_batch(scored, RolloutStats(), RLConfig()).summaries, agent)
            if "step" in metrics:
                raise ValueError("step is the name of no metric, and of no count or score")
        except Exception as error:
            raise ValueError(f"{named}: its trajectories have no metrics: {described(error)}") from error


def _trajectory(agent: Agent, counter: TokenCounter, problem: Problem) -> Trajectory:
    contexts = list[Context]()

    def respond(request: Any) -> Any:
        if isinstance(request, Generate):
            contexts.extend([Context((0, 0), (0.0, 0.0), (False, True))] * isinstance(request.text, Prompt))
            if not contexts:
                raise ValueError("a workflow must open a context with a Prompt before it adds text")
            return Completion(REPLY)
        if isinstance(request, Search):
            return (SearchResult((Passage("0", '"Title"\nText.'),)),) * len(request.queries)
        return ToolResult(request.tool, request.arguments, "0")

    start, tools = partial(agent.start, token_counter=counter), [schema["name"] for schema in agent.tools]
    outcome = run_workflow(checked(start, problem, tools), respond, respond)
    return Trajectory(problem, 0, outcome, tuple(contexts), f"{ASSISTANT}<think>{REPLY}<|im_end|>")
