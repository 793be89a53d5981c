"""Rewards of finished trajectories: the agent's rule, with the answerer and the judge of a run, or a user's function.

A user's function gets the trajectories of one problem, and `Scoring` where it takes a second parameter. It returns for
each trajectory a number, or one for each of its contexts.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from memsearcher_jax.agent.base import Agent, Complete, Logprobs, ReadingAgent, Scoring, no_logprobs
from memsearcher_jax.hosts.ending import RunEnded
from memsearcher_jax.logs.trajectories import decode_trajectory, encode_trajectory
from memsearcher_jax.model.qwen import Params
from memsearcher_jax.python_files import described, load_named
from memsearcher_jax.rl.completers import Completer
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.rl.text_logprobs import TextLogprobs
from memsearcher_jax.tokenizer import ChatTokenizer
from memsearcher_jax.types import Completion, Outcome, Problem, Prompt, ScoredTrajectory, StopReason, Trajectory

REWARD_DRAWS = 2**31 - 1  # folded into the key, so that answers and trajectories draw from different streams
CONTEXT_REWARDS_REFUSED = (
    "reward.function returned a list for a trajectory, a reward for each context, and rl.advantage_scope trajectory "
    "trains with one reward for each trajectory: set it to pooled or position, or return a number"
)
LARGEST = float(np.finfo(np.float32).max)  # reward: advantages are computed in float32


@dataclass(frozen=True)
class RewardFn:
    """Scores trajectories."""

    agent: Agent
    tokenizer: ChatTokenizer
    answerer: Completer | None = None
    judge: Completer | None = None
    evaluation: bool = False  # some benchmarks are scored by other rules in evaluation
    # Whether reward.function may return a reward for each context, as `takes_context_rewards` says of the settings.
    takes_context_rewards: bool = True
    text_logprobs: TextLogprobs | None = None  # what scores texts with the weights of the policy

    def __call__(
        self,
        trajectories: Sequence[Trajectory],
        key: jax.Array,
        notify: Callable[[str], None],
        params: Params | None = None,
    ) -> list[ScoredTrajectory]:
        """One `ScoredTrajectory` for each, in order; `key` decides what answerer and judge sample.

        `params`: the policy's weights, as they were published to the sampler; None where none are loaded. A fault has
        no reward, whatever an agent or a function of a user's says. Raises ConnectionError where answerer or judge
        complete nothing at all.
        """
        answerer = completing_once(self.answerer, key)
        judge = completing_once(self.judge, key)
        logprobs: Logprobs = no_logprobs
        if self.text_logprobs is not None and params is not None:
            logprobs = partial(self.text_logprobs, params)
        scoring = Scoring(self.tokenizer, answerer, judge, notify, self.evaluation, logprobs)
        scored = agent_rewards(self.agent, trajectories, scoring)
        if file := self.agent.reward.function:
            scored = own_rewards(file, scored, scoring, takes_context_rewards=self.takes_context_rewards)
        rewarded = []
        for trajectory in map(_with_tool_reward, scored):
            is_fault = trajectory.trajectory.outcome.stop.is_fault
            rewarded.append(_unrewarded(trajectory, trajectory.reason) if is_fault else trajectory)
        return rewarded

    def answer(self, pairs: Sequence[tuple[Any, str]], key: jax.Array) -> list[Completion]:
        """The answers to (memory, question) pairs, of an agent that reads texts into a memory."""
        assert isinstance(self.agent, ReadingAgent), "only agents that read answer from a memory"
        return self.agent.answer(pairs, Scoring(self.tokenizer, completing_once(self.answerer, key)))


def agent_rewards(agent: Agent, trajectories: Sequence[Trajectory], scoring: Scoring) -> list[ScoredTrajectory]:
    """The rewards of the agent. What a user's agent says wrong, or raises, makes faults, without a reward."""
    is_own = agent.config.workflow.endswith(".py")
    if is_own:
        trajectories = [_writable(trajectory) for trajectory in trajectories]
    try:
        scored = call_agent_rewards(agent, trajectories, scoring)
    except (Exception, SystemExit) as error:  # a command line that it calls may exit
        if not is_own or isinstance(error, ConnectionError | RunEnded):
            raise
        reason = described(error)
        return [_lost(ScoredTrajectory(trajectory, math.nan), reason) for trajectory in trajectories]
    return [_checked(trajectory, agent) for trajectory in scored]


def call_agent_rewards(agent: Agent, trajectories: Sequence[Trajectory], scoring: Scoring) -> list[ScoredTrajectory]:
    """What the agent's `rewards` return. Raises what they raise, or TypeError for anything but scored trajectories."""
    scored = list(agent.rewards(trajectories, scoring))
    if not _score_all(scored, trajectories):
        raise TypeError(f"rewards returns a ScoredTrajectory for each trajectory, in order, not {scored!r:.200}")
    return scored


def _score_all(scored: Sequence[Any], trajectories: Sequence[Trajectory]) -> bool:
    """Whether these are scored trajectories, one for each of the others, in their order."""
    if not all(isinstance(item, ScoredTrajectory) for item in scored):
        return False
    return _rollouts([item.trajectory for item in scored]) == _rollouts(trajectories)


def _rollouts(trajectories: Sequence[Trajectory]) -> list[tuple[Problem, int]]:
    """What identifies each trajectory."""
    return [(trajectory.problem, trajectory.rollout) for trajectory in trajectories]


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
        reward = float(scored.reward)
        context_rewards = tuple(float(value) for value in scored.context_rewards)
        scores = {name: float(value) for name, value in scored.scores.items()}
    except (TypeError, ValueError, ArithmeticError) as error:
        return _lost(scored, f"rewards returned what is no number: {error}")
    for value in (reward, *context_rewards, *scores.values()):
        if abs(value) > LARGEST:
            return _lost(scored, f"rewards returned {value}: it must be finite, also in float32")
    contexts = len(scored.trajectory.contexts)
    are_expected = bool(context_rewards) or agent.rewards_per == "context"
    if are_expected and len(context_rewards) != contexts:
        return _lost(scored, f"rewards returned {len(context_rewards)} context_rewards for {contexts} contexts")
    return replace(scored, reward=reward, reason=str(scored.reason), scores=scores, context_rewards=context_rewards)


def asks_models(agent: Agent) -> bool:
    """Whether rewards may ask an answerer, a judge or the policy, which need the memory of the sampler's cache."""
    if agent.needs_completers:
        return True
    file = agent.reward.function
    return bool(file) and load_reward_function(file).takes_scoring


def takes_context_rewards(settings: RLConfig) -> bool:
    """Whether training uses a reward of each context; else it would have to average them, which nobody asked for."""
    return settings.advantage_scope != "trajectory"


@dataclass(frozen=True)
class RewardFunction:
    """A user's function, of the trajectories of one problem."""

    function: Callable[..., Any]
    takes_scoring: bool  # whether its second parameter is `Scoring`

    def __call__(self, group: Sequence[ScoredTrajectory], scoring: Scoring) -> list[Any]:
        """What the function returns for one group. Raises what it raises, or an error for anything but a list."""
        trajectories = [member.trajectory for member in group]
        values = self.function(trajectories, scoring) if self.takes_scoring else self.function(trajectories)
        if isinstance(values, str | bytes | Mapping | Set):
            raise TypeError(f"returned {values!r:.200}: it must be a list")
        values = list(values)
        if len(values) != len(group):
            raise ValueError(f"{len(values)} rewards for {len(group)} trajectories")
        return values


def load_reward_function(file: str) -> RewardFunction:
    """What `reward.function` names. Raises ValueError or OSError in one line, also for parameters that nobody gives."""
    function = load_named(file, "reward.function", "reward")
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C need not say what it takes
        return RewardFunction(function, takes_scoring=False)
    except TypeError as error:
        raise ValueError(f"reward.function {file}: {error}") from error
    is_named = list(signature.parameters)[1:2] == ["scoring"]
    takes_scoring = is_named or not _takes(signature, 1)
    if not _takes(signature, 2 if takes_scoring else 1):
        raise ValueError(
            f"reward.function {file}: a reward takes (trajectories) or (trajectories, scoring), and not {signature}"
        )
    return RewardFunction(function, takes_scoring)


def _takes(signature: inspect.Signature, count: int) -> bool:
    """Whether a function can be called with so many arguments."""
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def own_rewards(
    file: str, scored: Sequence[ScoredTrajectory], scoring: Scoring, *, takes_context_rewards: bool = True
) -> list[ScoredTrajectory]:
    """The trajectories with the rewards of a user's function. Where it fails they are faults, without a reward.

    Without `takes_context_rewards` a list of the rewards of a trajectory's contexts is an error, too.
    """
    function = load_reward_function(file)
    rewarded = list[ScoredTrajectory]()
    for group in _groups(scored):
        try:
            values = function(group, scoring)
        except RunEnded:  # of what it asks
            raise
        except (Exception, SystemExit) as error:
            reason = described(error)
            rewarded += [_lost(member, reason) for member in group]
        else:
            for member, value in zip(group, values, strict=True):
                rewarded.append(_rewarded(member, value, takes_context_rewards))
    return rewarded


def _groups(scored: Sequence[ScoredTrajectory]) -> list[list[ScoredTrajectory]]:
    """The rollouts of each problem. They are adjacent, and their numbers rise.

    They are not told apart by the problem: two neighbours may be the same problem, or have one id.
    """
    groups = list[list[ScoredTrajectory]]()
    for trajectory in scored:
        is_next_rollout = bool(groups) and trajectory.trajectory.rollout > groups[-1][-1].trajectory.rollout
        if is_next_rollout:
            groups[-1].append(trajectory)
        else:
            groups.append([trajectory])
    return groups


def _rewarded(scored: ScoredTrajectory, value: Any, takes_context_rewards: bool) -> ScoredTrajectory:
    """The trajectory with a reward, or with a reward of each of its contexts, whose mean is then its own."""
    if scored.trajectory.outcome.stop.is_fault:
        return scored
    contexts = len(scored.trajectory.contexts)
    try:
        if np.ndim(value) > 0:
            context_rewards = tuple(float(reward) for reward in value)
            reward = sum(context_rewards) / contexts
        else:
            reward = float(value)
            context_rewards = (reward,) * contexts
    except (TypeError, ValueError, ArithmeticError):
        return _lost(scored, f"reward.function returned {value!r:.200}: it must be a number, or one for each context")
    if np.ndim(value) > 0 and not takes_context_rewards:
        return _lost(scored, CONTEXT_REWARDS_REFUSED)
    if len(context_rewards) != contexts:
        return _lost(scored, f"reward.function returned {len(context_rewards)} rewards for {contexts} contexts")
    if not all(abs(number) <= LARGEST for number in (reward, *context_rewards)):
        return _lost(scored, f"reward.function returned {value!r:.200}: it must be finite, also in float32")
    return replace(scored, reward=reward, reason="reward.function", context_rewards=context_rewards)


def _with_tool_reward(scored: ScoredTrajectory) -> ScoredTrajectory:
    """The trajectory with what tools of its own add to its reward, and to those of its contexts."""
    added = scored.trajectory.outcome.tool_reward
    if added is None or scored.trajectory.outcome.stop.is_fault:
        return scored
    if not abs(added) <= LARGEST:
        return _lost(scored, f"the reward of a tool is {added}: it must be finite, also in float32")
    context_rewards = tuple(reward + added for reward in scored.context_rewards)
    scores = scored.scores | {"tool_reward": added}
    return replace(scored, reward=scored.reward + added, context_rewards=context_rewards, scores=scores)


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
