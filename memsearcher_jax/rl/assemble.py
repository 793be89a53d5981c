"""From scored trajectories to training samples: multi-context GRPO.

The reward belongs to the trajectory. It is normalised over the trajectories of its group, and every context of the
trajectory carries the same advantage (paper, section 3.3; arXiv 2511.02805). Long trajectories do not shift the mean of
their group: each counts once there, however many contexts it has.

Mem-alpha (arXiv 2509.25911) rewards every context on its own. There the group is all contexts of all rollouts of a
problem, and rewards that fall or rise along the stream become advantages even where all rollouts are alike; with the
contexts of one position as the group they do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from memsearcher_jax.agent.types import Context, Trajectory
from memsearcher_jax.report.trajectories import Scored
from memsearcher_jax.rl.config import Baseline, RLConfig
from memsearcher_jax.training.grpo import group_advantages
from memsearcher_jax.training.rows import Sample


def samples_of(batch: Sequence[Scored], group_R: Sequence[int], settings: RLConfig) -> list[Sample]:
    """What `batch` teaches under `settings`; a trajectory that nobody could score teaches nothing."""
    if settings.baseline != "trajectory":
        return assemble_contexts(
            [one.trajectory for one in batch],
            [one.context_rewards for one in batch],
            group_R,
            baseline=settings.baseline,
            even_groups=settings.even_groups,
        )
    known = [(one, group) for one, group in zip(batch, group_R, strict=True) if not math.isnan(one.reward)]
    return assemble(
        [one.trajectory for one, _ in known],
        [one.reward for one, _ in known],
        [group for _, group in known],
        last_only=settings.credit == "last context",
        even_groups=settings.even_groups,
    )


def assemble(
    trajectories: Sequence[Trajectory],
    reward_R: Sequence[float],
    group_R: Sequence[int],
    *,
    last_only: bool = False,
    even_groups: bool = True,
) -> list[Sample]:
    """One sample per context that holds at least one sampled token, in the order of the trajectories.

    `group_R` tells which trajectories are rollouts of one problem. `last_only`: only of the context that ended a
    trajectory. Without `even_groups` nothing comes of groups whose rewards are all equal.
    """
    advantage_R, spread_R = _normalised(reward_R, group_R)
    return [
        _sample(context, advantage)
        for trajectory, advantage, has_spread in zip(trajectories, advantage_R, spread_R, strict=True)
        if even_groups or has_spread
        for context in (trajectory.contexts[-1:] if last_only else trajectory.contexts)
        if any(context.sampled)
    ]


def assemble_contexts(
    trajectories: Sequence[Trajectory],
    reward_RC: Sequence[Sequence[float]],
    group_R: Sequence[int],
    *,
    baseline: Baseline,
    even_groups: bool = True,
) -> list[Sample]:
    """Likewise, with a reward for each context: `reward_RC` holds one number per context of each trajectory.

    `baseline` "pooled" normalises over all contexts of a group, "position" over those of one place in their
    trajectories. A reward that is NaN was never given: its context enters no mean and is not trained.
    Raises ValueError where rewards and contexts differ in number.
    """
    contexts: list[Context] = []
    rewards: list[float] = []
    groups: list[str] = []
    for trajectory, reward_C, group in zip(trajectories, reward_RC, group_R, strict=True):
        if len(reward_C) != len(trajectory.contexts):
            raise ValueError(
                f"{len(reward_C)} rewards for the {len(trajectory.contexts)} contexts of problem "
                f"{trajectory.problem.id!r}"
            )
        for position, (context, reward) in enumerate(zip(trajectory.contexts, reward_C, strict=True)):
            if not np.isnan(reward):
                contexts.append(context)
                rewards.append(reward)
                groups.append(f"{group}/{position}" if baseline == "position" else str(group))
    return [
        _sample(context, advantage)
        for context, advantage, has_spread in zip(contexts, *_normalised(rewards, groups), strict=True)
        if (even_groups or has_spread) and any(context.sampled)
    ]


def _normalised(rewards: Sequence[float], groups: Sequence[int] | Sequence[str]) -> tuple[np.ndarray, list[bool]]:
    """The advantage of each entry, and whether the rewards of its group differ."""
    if not len(rewards):
        return np.zeros(0, np.float32), []
    rewards, groups = np.asarray(rewards, np.float32), np.asarray(groups)
    names, index = np.unique(groups, return_inverse=True)
    spread = np.array([np.ptp(rewards[index == number]) > 0 for number in range(len(names))])
    return np.asarray(group_advantages(rewards, groups)), spread[index].tolist()


def _sample(context: Context, advantage: float) -> Sample:
    return Sample(
        ids=np.array(context.ids, np.int32),
        logprobs=np.array(context.logprobs, np.float32),
        sampled=np.array(context.sampled, bool),
        advantage=float(advantage),
    )
