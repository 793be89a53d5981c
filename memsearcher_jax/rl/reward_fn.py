"""Rewards of trajectories that answer one question; `stream_reward` has those of trajectories that read a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from memsearcher_jax.agent import reward
from memsearcher_jax.agent.config import PAPER_REWARD, RewardConfig
from memsearcher_jax.agent.registry import WORKFLOWS
from memsearcher_jax.types import ScoredTrajectory, StopReason, Trajectory

RewardFn = Callable[[Sequence[Trajectory], jax.Array, Callable[[str], None]], list[ScoredTrajectory]]
"""(trajectories, key, notify) -> one `ScoredTrajectory` for each, in order; the key decides what is sampled, if
anything is, and `notify` gets a line on the progress."""


def answer_rewards(
    trajectories: Sequence[Trajectory],
    key: jax.Array,
    notify: Callable[[str], None],
    settings: RewardConfig = PAPER_REWARD,
    workflow: str = "memsearcher",
) -> list[ScoredTrajectory]:
    """The `RewardFn` of workflows that answer a question, with the last arguments bound: from text alone."""
    return [score_answer(trajectory, settings, workflow) for trajectory in trajectories]


def score_answer(
    trajectory: Trajectory,
    settings: RewardConfig = PAPER_REWARD,
    workflow: str = "memsearcher",
) -> ScoredTrajectory:
    """The training reward, and the metrics of the answer: 0 where there is none, no metrics where it was lost."""
    golden_answers = trajectory.problem.golden_answers
    earned = reward.trajectory_reward(
        trajectory.outcome,
        trajectory.transcript,
        golden_answers,
        settings,
        WORKFLOWS[workflow].parse_answer,
        trajectory.problem.supporting_titles,
    )
    if trajectory.outcome.stop.is_fault:
        return ScoredTrajectory(trajectory, earned.value, earned.reason)
    answered = trajectory.outcome.stop is StopReason.ANSWERED
    scores = reward.answer_scores(trajectory.outcome.answer if answered else None, golden_answers)
    return ScoredTrajectory(trajectory, earned.value, earned.reason, scores)
