"""Multi-context GRPO: from scored trajectories to training examples.

The reward belongs to the trajectory. It is normalised over the trajectories of its group, and every context of the
trajectory carries the same advantage (MemSearcher, arXiv 2511.02805, section 3.3). Long trajectories do not shift the
mean of their group: each counts once there, however many contexts it has.

Mem-alpha (arXiv 2509.25911) rewards every context on its own. With all contexts of a problem as the group ("pooled"),
rewards that rise or fall along the stream become advantages; with those of one position ("position") they do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.training.grpo import group_advantages
from memsearcher_jax.training.packing import TrainingExample
from memsearcher_jax.types import Context, ScoredTrajectory


def multi_context_advantages(
    scored: Sequence[ScoredTrajectory], group_R: Sequence[int], settings: RLConfig
) -> list[TrainingExample]:
    """One example per context that holds a sampled token, in the order of the trajectories.

    `group_R` says which trajectories are rollouts of one problem. A NaN reward means
    that there is none: it enters no mean, and what it belongs to is not trained. Raises ValueError where rewards and
    contexts differ in number.
    """
    # U: what has a reward of its own, a trajectory or a context.
    rewarded = [
        (reward, group, contexts, one.scores)
        for one, number in zip(scored, group_R, strict=True)
        for reward, group, contexts in _rewarded_contexts(one, number, settings)
        if not math.isnan(reward)
    ]
    if not rewarded:
        return []
    reward_U = np.array([reward for reward, *_ in rewarded], np.float32)
    group_U = np.array([group for _, group, *_ in rewarded])
    advantage_U = group_advantages(reward_U, group_U, norm_by_std=settings.norm_by_std)
    mixed = dict(zip(dict.fromkeys(group_U), mixed_groups(reward_U, group_U), strict=True))
    return [
        TrainingExample(
            np.array(context.ids, np.int32),
            np.array(context.logprobs, np.float32),
            np.array(context.sampled, bool),
            float(advantage),
            number,
            1.0 in (scores.get("exact_match"), scores.get("accuracy")),  # all of its answers are correct
            context.version,
        )
        for (_, group, contexts, scores), advantage in zip(rewarded, advantage_U, strict=True)
        if (settings.keep_constant_reward_groups and not settings.refill) or mixed[group]
        for number, context in contexts
        if any(context.sampled)
    ]


def mixed_groups(reward_R: npt.ArrayLike, group_R: Iterable[Any]) -> list[bool]:
    """For each group, in order of first members, whether its rewards differ: only such groups move the policy.

    NaN is no reward. Rewards are compared in float32, because equal F1 scores of two answers may differ in their last
    bit.
    """
    rewards: dict[Any, set[np.float32]] = {}
    for reward, group in zip(np.asarray(reward_R, np.float32), group_R, strict=True):
        rewards.setdefault(group, set()).update([] if math.isnan(reward) else [reward])
    return [len(values) > 1 for values in rewards.values()]


def _rewarded_contexts(
    scored: ScoredTrajectory, number: int, settings: RLConfig
) -> Iterator[tuple[float, str, Sequence[tuple[int, Context]]]]:
    """(reward, group, numbered contexts that carry its advantage) of one trajectory, in its order."""
    contexts = list(enumerate(scored.trajectory.contexts))
    if settings.advantage_scope == "trajectory":
        first = {"all_contexts": 0, "last_context": -1}[settings.credit]
        yield scored.reward, str(number), contexts[first:]
        return
    for (position, context), reward in zip(contexts, scored.context_rewards, strict=True):
        group = f"{number}/{position}" if settings.advantage_scope == "position" else str(number)
        yield reward, group, ((position, context),)
