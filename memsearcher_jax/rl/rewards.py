"""Rewards of finished trajectories: the agent's rule, with the answerer and the judge of a run, or a user's function.

A user's function gets the trajectories of one problem and returns for each a number, or one for each of its contexts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from memsearcher_jax.agent.base import Agent, Complete, ReadingAgent, Scoring
from memsearcher_jax.python_files import described, load_named
from memsearcher_jax.rl.completers import Completer
from memsearcher_jax.runtime.tokenizer import ChatTokenizer
from memsearcher_jax.types import Completion, Prompt, ScoredTrajectory, StopReason, Trajectory

REWARD_DRAWS = 2**31 - 1  # folded into the key, so that answers and trajectories draw from different streams


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

        A fault has no reward, whatever an agent or a function of a user's says.
        Raises ConnectionError where one of them completes nothing at all, ValueError for an agent that does not score
        each trajectory.
        """
        answerer, judge = completing_once(self.answerer, key), completing_once(self.judge, key)
        scored = self.agent.rewards(
            trajectories, Scoring(self.tokenizer, answerer, judge, notify, evaluation=self.evaluation)
        )
        if len(scored) != len(trajectories):
            workflow = self.agent.config.workflow
            raise ValueError(f"agent.workflow {workflow}: {len(scored)} rewards for {len(trajectories)} trajectories")
        if self.agent.reward.function:
            scored = own_rewards(self.agent.reward.function, scored)
        return [_unrewarded(one, one.reason) if one.trajectory.outcome.stop.is_fault else one for one in scored]

    def answer(self, pairs: Sequence[tuple[Any, str]], key: jax.Array) -> list[Completion]:
        """The answers to (memory, question) pairs, of an agent that reads texts into a memory."""
        assert isinstance(self.agent, ReadingAgent), "only agents that read answer from a memory"
        return self.agent.answer(pairs, Scoring(self.tokenizer, completing_once(self.answerer, key)))


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
            values = list(function([one.trajectory for one in group]))
            if len(values) != len(group):
                raise ValueError(f"{len(values)} rewards for {len(group)} trajectories")
        except Exception as error:
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
        each = tuple(map(float, value)) if hasattr(value, "__len__") else (float(value),) * len(contexts)
        reward = sum(each) / len(contexts) if hasattr(value, "__len__") else float(value)
    except (TypeError, ValueError, ZeroDivisionError):
        return _lost(scored, f"reward.function returned {value!r:.200}: it must be a number, or one for each context")
    if len(each) != len(contexts):
        return _lost(scored, f"reward.function returned {len(each)} rewards for {len(contexts)} contexts")
    if not all(map(math.isfinite, (reward, *each))):
        return _lost(scored, f"reward.function returned {value!r:.200}: it must be finite")
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
