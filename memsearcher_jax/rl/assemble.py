"""From scored trajectories to training samples: multi-context GRPO.

The reward belongs to the trajectory. It is normalised over the trajectories of its group, and every context of the
trajectory carries the same advantage (paper, section 3.3; arXiv 2511.02805). Long trajectories do not shift the mean of
their group: each counts once there, however many contexts it has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memsearcher_jax.agent.types import Trajectory
from memsearcher_jax.training.grpo import group_advantages
from memsearcher_jax.training.rows import Sample


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
    reward_R, group_R = np.asarray(reward_R, np.float32), np.asarray(group_R)
    advantage_R = np.asarray(group_advantages(reward_R, group_R))
    uneven = {group for group in set(group_R.tolist()) if np.ptp(reward_R[group_R == group]) > 0}
    return [
        Sample(
            ids=np.array(context.ids, np.int32),
            logprobs=np.array(context.logprobs, np.float32),
            sampled=np.array(context.sampled, bool),
            advantage=float(advantage),
        )
        for trajectory, advantage, group in zip(trajectories, advantage_R, group_R.tolist(), strict=True)
        if even_groups or group in uneven
        for context in (trajectory.contexts[-1:] if last_only else trajectory.contexts)
        if any(context.sampled)
    ]
