"""Tries an agent or a reward of a user's on one problem, with scripted replies, before long work starts.

A trial refuses only what is wrong whatever the policy and the tools say: a real run must not begin with a mistake that
ends every trajectory, but an agent that reads a number or JSON out of a reply, or out of a tool's result, may raise at
scripted ones. So an error is a mistake

- where it comes before the first reply and the first result;
- where it is an unknown name, attribute or parameter: see `_is_misuse`;
- where the package refuses what the workflow yields or returns, and refuses the same under every script.

Any other error ends the trial without a result. In a run it is the fault of one trajectory.
"""

from __future__ import annotations

import re
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

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
from memsearcher_jax.rl.rewards import (
    agent_rewards,
    call_agent_rewards,
    load_reward_function,
    own_rewards,
    takes_context_rewards,
)
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

PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
PACKAGE = PACKAGE_FOLDER.name
WRONG_ARGUMENTS = re.compile(
    r"unexpected keyword argument|missing \d+ required|takes .* positional argument|got multiple values for"
)

SECONDS = 20.0  # after which a workflow does not end
REPLY = "an attempt</think> <memory> nothing </memory> \\boxed{attempt}"


@dataclass(frozen=True)
class Script:
    """What the policy and the tools say in one trial."""

    reply: str
    result: str


SCRIPTS = (Script(REPLY, "0"), Script('{"answer": "attempt"}', '{"result": "attempt"}'), Script("7", "attempt"))


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
    probe(
        replace(agent, tools=tuple(tools)),
        ChatTokenizer.load(PACKAGED_TOKENIZER),
        problems["train"][0],
        takes_context_rewards=takes_context_rewards(config.rl),
    )


def probe(agent: Agent, counter: TokenCounter, problem: Problem, *, takes_context_rewards: bool = True) -> None:
    """Raises ValueError with one line that names file and line of a mistake in the agent's or the reward's file."""
    place = f"agent.workflow {Path(agent.config.workflow).absolute()}"
    trajectory = _trajectory_in_time(agent, counter, problem)
    if trajectory is None:
        return
    group = [replace(trajectory, rollout=rollout) for rollout in range(2)]
    scoring = Scoring(counter, logprobs=partial(_scripted_logprobs, counter))
    asks_nobody = not agent.needs_completers
    if asks_nobody and not _depends_on_replies(lambda: call_agent_rewards(agent, group, scoring)):
        _check_scored(place, agent, trajectory, agent_rewards(agent, group, scoring))
    file = agent.reward.function
    if file:
        function = load_reward_function(file)
        unscored = [ScoredTrajectory(member, 0.0) for member in group]
        if not _depends_on_replies(lambda: function(unscored, scoring)):
            rewarded = own_rewards(file, unscored, scoring, takes_context_rewards=takes_context_rewards)
            _check_scored(f"reward.function {file}", agent, trajectory, rewarded)


def _scripted_logprobs(counter: TokenCounter, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
    """One nat for each token."""
    return [-float(counter.count(text)) for _, text in zip(prompts, texts, strict=True)]


def _depends_on_replies(score: Callable[[], object]) -> bool:
    """Whether scoring raises an error that other replies may not raise."""
    try:
        score()
    except Exception as error:
        return not _is_misuse(error) and not _is_refusal(error)
    except SystemExit:
        return False
    return False


def _is_misuse(error: BaseException) -> bool:
    """Whether the code names what does not exist: a variable, a module, an attribute of the package's, a parameter."""
    if isinstance(error, NameError | ImportError):
        return True
    if isinstance(error, AttributeError):
        module = error.obj.__name__ if isinstance(error.obj, ModuleType) else type(error.obj).__module__
        return isinstance(error.obj, ModuleType) or module.partition(".")[0] == PACKAGE
    return isinstance(error, TypeError) and WRONG_ARGUMENTS.search(str(error)) is not None


def _is_refusal(error: BaseException) -> bool:
    """Whether the package itself raises the error, for what the user's code gave it."""
    if str(error).startswith("the workflow "):  # of `checked`, which raises it in the line that yields
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(PACKAGE_FOLDER)


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


class _Trial(NamedTuple):
    """How a workflow ended under one script."""

    result: Trajectory | BaseException
    was_answered: bool  # whether it got a reply or a result before it ended


def _trajectory_in_time(agent: Agent, counter: TokenCounter, problem: Problem) -> Trajectory | None:
    """The trajectory under the first script with one; None if the workflow raises what depends on the script.

    Raises ValueError where its error is a mistake, or where it does not end in `SECONDS`.
    """
    file = str(Path(agent.config.workflow).absolute())
    trials = list[_Trial]()

    def attempt() -> None:
        for script in SCRIPTS:
            trials.append(_try(agent, counter, problem, script))
            error = trials[-1].result
            if isinstance(error, Trajectory) or not trials[-1].was_answered or _is_misuse(error):
                return

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(SECONDS)
    if thread.is_alive():
        line = _running_line(thread, file)
        raise ValueError(f"agent.workflow {file}{line}: the workflow does not end: no result in {SECONDS:g} s")
    last = trials[-1]
    if isinstance(last.result, Trajectory):
        return last.result
    errors = [trial.result for trial in trials if isinstance(trial.result, BaseException)]
    messages = {described(error) for error in errors}
    always_refused = len(messages) == 1 and all(map(_is_refusal, errors))
    exits = not isinstance(last.result, Exception)  # such as SystemExit, which would end the run
    if not last.was_answered or _is_misuse(last.result) or always_refused or exits:
        raise ValueError(f"agent.workflow {file}: {described(last.result)}") from last.result
    return None


def _running_line(thread: threading.Thread, file: str) -> str:
    """The line of the file that the thread executes, with a comma before it; "" if it executes none."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return f", line {frame.f_lineno}" if frame else ""


def _try(agent: Agent, counter: TokenCounter, problem: Problem, script: Script) -> _Trial:
    """What the agent does where the script answers and every search finds the same passage."""
    contexts = list[Context]()
    answers = list[Completion | tuple[SearchResult, ...] | ToolResult]()

    def generate(request: Generate) -> Completion:
        if isinstance(request.text, Prompt):
            sampled = np.array([False, True])
            contexts.append(Context(np.zeros(2, np.int32), np.zeros(2, np.float32), sampled))
        if not contexts:
            raise ValueError("a workflow must open a context with a Prompt before it adds text")
        completion = Completion(script.reply)
        answers.append(completion)
        return completion

    def answer(request: Search | Call) -> tuple[SearchResult, ...] | ToolResult:
        if isinstance(request, Search):
            result = SearchResult((Passage("0", '"Title"\nText.'),))
            found = tuple(result for _ in request.queries)
        else:
            found = ToolResult(request.tool, request.arguments, script.result)
        answers.append(found)
        return found

    start = partial(agent.start, token_counter=counter)
    tools = [schema["name"] for schema in agent.tools]
    try:
        outcome = run_workflow(checked(start, problem, tools), generate, answer)
    except BaseException as error:
        return _Trial(error, bool(answers))
    transcript = f"{ASSISTANT}<think>{script.reply}<|im_end|>"
    return _Trial(Trajectory(problem, 0, outcome, tuple(contexts), transcript), bool(answers))
