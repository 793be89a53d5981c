"""Multi-context GRPO: from scored trajectories to training examples.

The reward belongs to the trajectory. It is normalised over the trajectories of its group, and every context of the
trajectory carries the same advantage (MemSearcher, arXiv 2511.02805, section 3.3). Long trajectories do not shift the
mean of their group: each counts once there, however many contexts it has.

Mem-alpha (arXiv 2509.25911) rewards every context on its own. With all contexts of a problem as the group ("pooled"),
rewards that rise or fall along the stream become advantages; with those of one position ("position") they do not.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.training.config import TrainOn
from memsearcher_jax.training.grpo import group_advantages
from memsearcher_jax.training.packing import TrainingExample
from memsearcher_jax.types import Context, ScoredTrajectory


@dataclass(frozen=True)
class NumberedContext:
    """A context and its position in its trajectory, counted from 0."""

    position: int
    context: Context


@dataclass(frozen=True)
class RewardedUnit:
    """What has one reward: a trajectory, or one of its contexts. The letter U stands for these units."""

    reward: float  # NaN: none
    group: str  # over whose units the reward is normalised
    contexts: Sequence[NumberedContext]  # that are trained with the unit's advantage
    is_correct: bool  # whether all answers of its trajectory are


def multi_context_advantages(
    scored: Sequence[ScoredTrajectory], group_R: Sequence[int], settings: RLConfig, train_on: TrainOn = "all"
) -> list[TrainingExample]:
    """One example per context that holds a token to train, in the order of the trajectories.

    `train_on` says which of the sampled tokens these are, `group_R` which trajectories are rollouts of one problem. A
    NaN reward means that there is none: it enters no mean, and what it belongs to is not trained. Raises ValueError
    where rewards and contexts differ in number.

    For example, two rollouts of one problem have the rewards 1 and 0, and three contexts and one: their advantages are
    0.707 and -0.707, and the examples have 0.707, 0.707, 0.707 and -0.707.
    """
    units = list[RewardedUnit]()
    for trajectory, group in zip(scored, group_R, strict=True):
        for unit in _rewarded_units(trajectory, group, settings):
            if not math.isnan(unit.reward):
                units.append(unit)
    if not units:
        return []

    reward_U = np.array([unit.reward for unit in units], np.float32)
    groups = [unit.group for unit in units]
    advantage_U = group_advantages(reward_U, groups, norm_by_std=settings.norm_by_std)
    is_mixed = _is_mixed(reward_U, groups)
    trains_every_group = settings.keep_constant_reward_groups and not settings.refill

    examples = list[TrainingExample]()
    for unit, advantage in zip(units, advantage_U, strict=True):
        if trains_every_group or is_mixed[unit.group]:
            for numbered in unit.contexts:
                trained = trained_tokens(numbered.context, train_on)
                if trained.any():
                    examples.append(_example(numbered, trained, float(advantage), unit.is_correct))
    return examples


def mixed_groups(reward_R: npt.ArrayLike, group_R: Iterable[Hashable]) -> list[bool]:
    """For each group, in order of first members, whether its rewards differ: only such groups move the policy.

    NaN is no reward. Rewards are compared in float32, because equal F1 scores of two answers may differ in their last
    bit.
    """
    return list(_is_mixed(reward_R, group_R).values())


def _is_mixed(rewards: npt.ArrayLike, groups: Iterable[Hashable]) -> dict[Hashable, bool]:
    """By group, in order of first members, whether its rewards differ."""
    distinct: dict[Hashable, set[np.float32]] = {}
    for reward, group in zip(np.asarray(rewards, np.float32), groups, strict=True):
        rewards_of_group = distinct.setdefault(group, set())
        if not math.isnan(reward):
            rewards_of_group.add(reward)
    return {group: len(rewards_of_group) > 1 for group, rewards_of_group in distinct.items()}


def _rewarded_units(scored: ScoredTrajectory, group: int, settings: RLConfig) -> list[RewardedUnit]:
    """The units of one trajectory, in the order of its contexts."""
    is_correct = 1.0 in (scored.scores.get("exact_match"), scored.scores.get("accuracy"))
    contexts = [NumberedContext(position, context) for position, context in enumerate(scored.trajectory.contexts)]
    if settings.advantage_scope == "trajectory":
        trained = contexts if settings.credit == "all_contexts" else contexts[-1:]
        return [RewardedUnit(scored.reward, str(group), trained, is_correct)]

    units = []
    for numbered, reward in zip(contexts, scored.context_rewards, strict=True):
        unit_group = f"{group}/{numbered.position}" if settings.advantage_scope == "position" else str(group)
        units.append(RewardedUnit(reward, unit_group, [numbered], is_correct))
    return units


def trained_tokens(context: Context, train_on: TrainOn) -> np.ndarray:
    """bool, one entry per token: the sampled ones of the kind that is trained.

    Raises ValueError for a context that does not tell the kinds apart.
    """
    sampled = context.sampled
    if train_on == "all":
        return sampled
    if not len(context.memory):
        raise ValueError(f"training.train_on {train_on} needs contexts whose memories are marked, and one is not")
    return sampled & context.memory if train_on == "memories" else sampled & ~context.memory


def _example(numbered: NumberedContext, trained: np.ndarray, advantage: float, is_correct: bool) -> TrainingExample:
    context = numbered.context
    return TrainingExample(
        ids=context.ids,
        logprobs=context.logprobs,
        sampled=trained,
        advantage=advantage,
        number=numbered.position,
        correct=is_correct,
        version=context.version,
        memory=context.memory if len(context.memory) else None,
    )
