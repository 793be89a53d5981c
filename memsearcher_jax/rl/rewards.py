"""Rewards of finished trajectories: the agent's rule, with the answerer and the judge of a run, or a user's function.

A user's function gets the trajectories of one problem and returns for each a number, or one for each of its contexts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from memsearcher_jax.agent.base import Agent, Complete, ReadingAgent, Scoring
from memsearcher_jax.hosts.ending import RunEnded
from memsearcher_jax.logs.trajectories import decode_trajectory, encode_trajectory
from memsearcher_jax.python_files import described, load_named
from memsearcher_jax.rl.completers import Completer
from memsearcher_jax.tokenizer import ChatTokenizer
from memsearcher_jax.types import Completion, Outcome, Prompt, ScoredTrajectory, StopReason, Trajectory

REWARD_DRAWS = 2**31 - 1  # folded into the key, so that answers and trajectories draw from different streams
LARGEST = float(np.finfo(np.float32).max)  # reward: advantages are computed in float32


@dataclass(frozen=True)
class RewardFn:
    """Scores trajectories."""

    agent: Agent
    tokenizer: ChatTokenizer
    answerer: Completer | None = None
    judge: Completer | None = None
    evaluation: bool = False  # some benchmarks are scored by other rules in evaluation

    def __call__(
        self, trajectories: Sequence[Trajectory], key: jax.Array, notify: Callable[[str], None]
    ) -> list[ScoredTrajectory]:
        """One `ScoredTrajectory` for each, in order; `key` decides what answerer and judge sample.

        A fault has no reward, whatever an agent or a function of a user's says. Raises ConnectionError where answerer
        or judge complete nothing at all.
        """
        answerer, judge = completing_once(self.answerer, key), completing_once(self.judge, key)
        scoring = Scoring(self.tokenizer, answerer, judge, notify, evaluation=self.evaluation)
        scored = agent_rewards(self.agent, trajectories, scoring)
        if self.agent.reward.function:
            scored = own_rewards(self.agent.reward.function, scored)
        return [_unrewarded(one, one.reason) if one.trajectory.outcome.stop.is_fault else one for one in scored]

    def answer(self, pairs: Sequence[tuple[Any, str]], key: jax.Array) -> list[Completion]:
        """The answers to (memory, question) pairs, of an agent that reads texts into a memory."""
        assert isinstance(self.agent, ReadingAgent), "only agents that read answer from a memory"
        return self.agent.answer(pairs, Scoring(self.tokenizer, completing_once(self.answerer, key)))


def agent_rewards(agent: Agent, trajectories: Sequence[Trajectory], scoring: Scoring) -> list[ScoredTrajectory]:
    """The rewards of the agent. What a user's agent says wrong, or raises, makes faults, without a reward."""
    if is_own := agent.config.workflow.endswith(".py"):
        trajectories = list(map(_writable, trajectories))
    try:
        scored = list(agent.rewards(trajectories, scoring))
        found = [one.trajectory for one in scored if isinstance(one, ScoredTrajectory)]
        names, given = ([(one.problem, one.rollout) for one in some] for some in (found, trajectories))
        if len(scored) != len(found) or names != given:
            raise TypeError(f"rewards returns a ScoredTrajectory for each trajectory, in order, not {scored!r:.200}")
    except (Exception, SystemExit) as error:  # a command line that it calls may exit
        if not is_own or isinstance(error, ConnectionError | RunEnded):
            raise
        return [_lost(ScoredTrajectory(one, math.nan), described(error)) for one in trajectories]
    return [_checked(one, agent) for one in scored]


def _writable(trajectory: Trajectory) -> Trajectory:
    """The trajectory, or a fault in place of an outcome that no reader of the files accepts."""
    try:
        decode_trajectory("read back", encode_trajectory(ScoredTrajectory(replace(trajectory, contexts=()), 0.0)))
        return trajectory
    except Exception as error:
        outcome = Outcome(StopReason.FAULT, error=f"its trajectory cannot be written: {described(error)}")
        return replace(trajectory, outcome=outcome, tool_results=())


def _checked(scored: ScoredTrajectory, agent: Agent) -> ScoredTrajectory:
    """The trajectory with its numbers as Python's, or as a fault where they are none of float32. NaN: no reward."""
    try:
        scores = {name: float(value) for name, value in scored.scores.items()}
        reward, *each = map(float, (scored.reward, *scored.context_rewards))
    except (TypeError, ValueError, ArithmeticError) as error:
        return _lost(scored, f"rewards returned what is no number: {error}")
    if wrong := [one for one in (reward, *each, *scores.values()) if abs(one) > LARGEST]:
        return _lost(scored, f"rewards returned {wrong[0]}: it must be finite, also in float32")
    contexts = len(scored.trajectory.contexts)
    if len(each) != contexts and (each or agent.rewards_per == "context"):
        return _lost(scored, f"rewards returned {len(each)} context_rewards for {contexts} contexts")
    return replace(scored, reward=reward, reason=str(scored.reason), scores=scores, context_rewards=tuple(each))


def own_rewards(file: str, scored: Sequence[ScoredTrajectory]) -> list[ScoredTrajectory]:
    """The trajectories with the rewards of a user's function. Where it fails they are faults, without a reward."""
    function, rewarded = load_named(file, "reward.function", "reward"), list[ScoredTrajectory]()
    groups = list[list[ScoredTrajectory]]()
    for one in scored:
        # Not by the problem: two neighbours may be the same, or have one id.
        if not groups or one.trajectory.rollout <= groups[-1][-1].trajectory.rollout:
            groups.append([])
        groups[-1].append(one)
    for group in groups:
        try:
            values = function([one.trajectory for one in group])
            if isinstance(values, str | bytes | Mapping | Set):
                raise TypeError(f"returned {values!r:.200}: it must be a list")
            if len(values := list(values)) != len(group):
                raise ValueError(f"{len(values)} rewards for {len(group)} trajectories")
        except (Exception, SystemExit) as error:
            rewarded += [_lost(one, described(error)) for one in group]
        else:
            rewarded += map(_rewarded, group, values)
    return rewarded


def _rewarded(scored: ScoredTrajectory, value: Any) -> ScoredTrajectory:
    """The trajectory with a reward, or with a reward of each of its contexts, whose mean is then its own."""
    contexts = scored.trajectory.contexts
    if scored.trajectory.outcome.stop.is_fault:
        return scored
    try:
        listed = np.ndim(value) > 0
        each = tuple(map(float, value)) if listed else (float(value),) * len(contexts)
        reward = sum(each) / len(contexts) if listed else float(value)
    except (TypeError, ValueError, ArithmeticError):
        return _lost(scored, f"reward.function returned {value!r:.200}: it must be a number, or one for each context")
    if len(each) != len(contexts):
        return _lost(scored, f"reward.function returned {len(each)} rewards for {len(contexts)} contexts")
    if not all(abs(one) <= LARGEST for one in (reward, *each)):
        return _lost(scored, f"reward.function returned {value!r:.200}: it must be finite, also in float32")
    return replace(scored, reward=reward, reason="reward.function", context_rewards=each)


def _lost(scored: ScoredTrajectory, error: str) -> ScoredTrajectory:
    """The trajectory as a fault of the machinery, which has no reward."""
    outcome = replace(scored.trajectory.outcome, stop=StopReason.FAULT, error=error)
    return _unrewarded(replace(scored, trajectory=replace(scored.trajectory, outcome=outcome)), error)


def _unrewarded(scored: ScoredTrajectory, reason: str) -> ScoredTrajectory:
    """The trajectory without rewards, of its contexts too, and without scores."""
    nothing = (math.nan,) * len(scored.trajectory.contexts)
    return ScoredTrajectory(scored.trajectory, math.nan, reason, {}, nothing)


def completing_once(completer: Completer | None, key: jax.Array) -> Complete | None:
    """Completes equal prompts once: rollouts with equal memories ask equal questions."""
    if completer is None:
        return None

    def complete(prompts: Sequence[Prompt], draws: int) -> list[Completion]:
        distinct = list(dict.fromkeys(prompts))
        key_of_draws = jax.random.fold_in(jax.random.fold_in(key, REWARD_DRAWS), draws)
        completions = dict(zip(distinct, completer.complete(distinct, key_of_draws), strict=True))
        return [completions[prompt] for prompt in prompts]

    return complete
