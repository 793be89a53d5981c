"""An agent of another framework: a program that asks the policy over HTTP and returns an answer, a reward, or both.

`rl.harness` and its endpoint run it. This module says how its trajectories are rewarded and what its settings mean.
"""

from __future__ import annotations

import inspect
import json
import math
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memsearcher_jax.agent import reward as answers
from memsearcher_jax.agent.base import PromptTokenizer, QuestionAgent
from memsearcher_jax.python_files import load_named
from memsearcher_jax.types import Outcome, Problem, ScoredTrajectory, StopReason, TokenCounter, Trajectory, Workflow


@dataclass(frozen=True)
class HarnessOutcome(Outcome):
    """The result of a harness."""

    reward: float | None = None  # that it gave itself; None: its answer is rewarded


def is_file(harness: str) -> bool:
    """Whether the setting `agent.harness` names a Python file, and not a command, which may end with one."""
    return harness.endswith(".py") and (Path(harness).is_file() or len(shlex.split(harness)) == 1)


def open_harness(harness: str) -> Callable[..., Any] | list[str]:
    """The function in the file that `agent.harness` names, which is executed, or the words of its command.

    Raises ValueError or OSError in one line.
    """
    if not is_file(harness):
        words = shlex.split(harness)
        if not words or shutil.which(words[0]) is None:
            raise FileNotFoundError(f"agent.harness {harness!r}: there is no program {words[0] if words else ''!r}")
        return words
    function = load_named(harness, "agent.harness", "harness")
    try:
        inspect.signature(function).bind("problem", "client")
    except (TypeError, ValueError) as error:
        raise ValueError(f"agent.harness {harness}: must be a function of (problem, client) ({error})") from error
    return function


def parse_result(value: Any) -> tuple[str | None, float | None]:
    """(answer, reward) of what a harness returned: a text, a number, a pair of both, a mapping with both, or None.

    Raises TypeError for anything else, and for a reward that is not finite.
    """
    answer: Any = None
    reward: Any = None
    if isinstance(value, Mapping):
        answer = value.get("answer")
        reward = value.get("reward")
    elif isinstance(value, tuple | list) and len(value) == 2:
        answer, reward = value
    elif isinstance(value, str):
        answer = value
    elif value is not None:
        reward = value
    if answer is not None and not isinstance(answer, str):
        raise TypeError(f"the harness returned {value!r:.200}: its answer must be a text")
    if reward is None:
        return answer, None
    try:
        number = float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise TypeError(f"the harness returned {value!r:.200}: it must be an answer, a finite number, or both")
    return answer, number


def parse_output(text: str) -> tuple[str | None, float | None]:
    """(answer, reward) of what a program printed: its last line, as JSON with `answer` and `reward`, or as the answer.

    Raises TypeError as `parse_result`.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return None, None
    try:
        value = json.loads(lines[-1])
    except (ValueError, RecursionError):
        value = None
    return parse_result(value) if isinstance(value, Mapping) else (lines[-1].strip(), None)


class Harness(QuestionAgent):
    """The program in `agent.harness`."""

    @property
    def prompts(self) -> Any:
        return None  # they are the harness's own

    def start(self, problem: Problem, token_counter: TokenCounter) -> Workflow:
        raise TypeError("a harness has no workflow: rl.harness runs it")

    def context_budget(self) -> dict[str, int]:
        return {"agent.completion_tokens": self.config.completion_tokens}

    def template_tokens(self, tokenizer: PromptTokenizer) -> int:
        return 0

    def _score(self, trajectory: Trajectory) -> ScoredTrajectory:
        """The reward that the harness gave, or that of its answer; the metrics of the answer."""
        scored = super()._score(trajectory)
        reward = getattr(trajectory.outcome, "reward", None)
        if trajectory.outcome.stop.is_fault or reward is None:
            return scored
        return ScoredTrajectory(trajectory, reward, "given by the harness", scored.scores)

    def _earned(self, trajectory: Trajectory) -> answers.Reward:
        def parse(transcript: str) -> answers.Parsed:
            return trajectory.outcome.answer, ""

        problem = trajectory.problem
        return answers.trajectory_reward(trajectory.outcome, "", problem.golden, self.reward, parse)


def outcome_of(answer: str | None, reward: float | None, counts: Mapping[str, int], turns: tuple) -> HarnessOutcome:
    """The outcome of a harness that returned."""
    stop = StopReason.NO_ANSWER if answer is None and reward is None else StopReason.ANSWERED
    return HarnessOutcome(stop, answer or "", turns, dict(counts), reward=reward)
