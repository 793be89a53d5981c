"""Tries an agent or a reward of a user's on one problem, with scripted replies, before long work starts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from memsearcher_jax.agent.base import Agent, Scoring
from memsearcher_jax.agent.prompts import ASSISTANT
from memsearcher_jax.agent.run import checked, run_workflow
from memsearcher_jax.agent.tool_state import named_tools
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
    Call,
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
    is_own = config.has_own_agent or config.reward.function
    needs_server = any(name.startswith(MCP) for name in config.agent.tools)
    if not is_own or needs_server or config.agent.replay:
        return
    agent = agent_of(config)
    tools = []
    for file in config.agent.tools:
        tools += [tool.schema for tool in named_tools(file)]
    problems = make_problems(replace(config.data, synthetic=agent.synthetic_data))
    probe(replace(agent, tools=tuple(tools)), ChatTokenizer.load(PACKAGED_TOKENIZER), problems["train"][0])


def probe(agent: Agent, counter: TokenCounter, problem: Problem) -> None:
    """Raises ValueError with one line that names file and line of a mistake in the agent's or the reward's file."""
    place = f"agent.workflow {Path(agent.config.workflow).absolute()}"
    trajectory = _trajectory_in_time(agent, counter, problem)
    group = [replace(trajectory, rollout=rollout) for rollout in range(2)]
    if not agent.needs_completers:
        _check_scored(place, agent, trajectory, agent_rewards(agent, group, Scoring(counter)))
    if agent.reward.function:
        unscored = [ScoredTrajectory(member, 0.0) for member in group]
        rewarded = own_rewards(agent.reward.function, unscored)
        _check_scored(f"reward.function {agent.reward.function}", agent, trajectory, rewarded)


def _check_scored(place: str, agent: Agent, trajectory: Trajectory, scored: Sequence[ScoredTrajectory]) -> None:
    """Raises ValueError where scoring has made faults of the trajectory, or where it has no metrics."""
    for rewarded in scored:
        outcome = rewarded.trajectory.outcome
        if outcome.stop is not trajectory.outcome.stop:
            raise ValueError(f"{place}: {outcome.error}")
    try:
        metrics = trajectory_metrics(make_rollout_batch(scored, RolloutStats(), RLConfig()).summaries, agent)
        if "step" in metrics:
            raise ValueError("step is the name of no metric, and of no count or score")
    except Exception as error:
        raise ValueError(f"{place}: its trajectories have no metrics: {described(error)}") from error


def _trajectory_in_time(agent: Agent, counter: TokenCounter, problem: Problem) -> Trajectory:
    """The trajectory of `_trajectory`. Raises ValueError where the workflow raises, or does not end in `SECONDS`."""
    file = str(Path(agent.config.workflow).absolute())
    results = list[Trajectory | BaseException]()

    def attempt() -> None:
        try:
            results.append(_trajectory(agent, counter, problem))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(SECONDS)
    if not results:
        line = _running_line(thread, file)
        raise ValueError(f"agent.workflow {file}{line}: the workflow does not end: no result in {SECONDS:g} s")
    (result,) = results
    if isinstance(result, BaseException):
        raise ValueError(f"agent.workflow {file}: {described(result)}") from result
    return result


def _running_line(thread: threading.Thread, file: str) -> str:
    """The line of the file that the thread executes, with a comma before it; "" if it executes none."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return f", line {frame.f_lineno}" if frame else ""


def _trajectory(agent: Agent, counter: TokenCounter, problem: Problem) -> Trajectory:
    """What the agent does where every reply is `REPLY` and every search finds the same passage."""
    contexts = list[Context]()

    def generate(request: Generate) -> Completion:
        if isinstance(request.text, Prompt):
            contexts.append(Context((0, 0), (0.0, 0.0), (False, True)))
        if not contexts:
            raise ValueError("a workflow must open a context with a Prompt before it adds text")
        return Completion(REPLY)

    def answer(request: Search | Call) -> tuple[SearchResult, ...] | ToolResult:
        if isinstance(request, Search):
            result = SearchResult((Passage("0", '"Title"\nText.'),))
            return tuple(result for _ in request.queries)
        return ToolResult(request.tool, request.arguments, "0")

    start = partial(agent.start, token_counter=counter)
    tools = [schema["name"] for schema in agent.tools]
    outcome = run_workflow(checked(start, problem, tools), generate, answer)
    return Trajectory(problem, 0, outcome, tuple(contexts), f"{ASSISTANT}<think>{REPLY}<|im_end|>")
