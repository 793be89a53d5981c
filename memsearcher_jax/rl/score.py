"""Scores of trajectories, and what a batch of them looks like in numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from memsearcher_jax.agent import reward
from memsearcher_jax.agent.types import Stop, Trajectory
from memsearcher_jax.report.names import Name
from memsearcher_jax.report.page_facts import Facts, facts_of
from memsearcher_jax.report.trajectories import Scored


def scored(trajectory: Trajectory) -> Scored:
    """The training reward, and the metrics of the answer (0 where there is none)."""
    golden = trajectory.problem.golden_answers
    earned = reward.score(trajectory.outcome, trajectory.transcript, golden)
    answer = trajectory.outcome.answer
    answered = trajectory.outcome.stop is Stop.ANSWERED
    return Scored(trajectory, earned.value, earned.reason, answer_scores(answer if answered else None, golden))


def answer_scores(answer: str | None, golden: Sequence[str]) -> dict[str, float]:
    """Every metric of an answer, in [0, 1]; all are 0 without one."""
    overlap = reward.token_overlap(answer, golden)
    return {
        "exact_match": reward.exact_match(answer, golden),
        "f1": overlap.f1,
        "cover_exact_match": reward.cover_exact_match(answer, golden),
        "precision": overlap.precision,
        "recall": overlap.recall,
    }


def summarise(batch: Sequence[Scored]) -> dict[str, float]:
    """Means over trajectories; per-turn numbers are means over turns; `stop/` are shares of the trajectories."""
    return summarise_facts([facts_of(one) for one in batch])


def summarise_facts(batch: Sequence[Facts]) -> dict[str, float]:
    """`summarise` of what was kept of each trajectory."""
    return {
        Name.REWARD: _mean([one.reward for one in batch]),
        **{name: _mean([one.scores[name] for one in batch]) for name in batch[0].scores},
        **_by_hops(batch),
        "searches": _mean([one.searches for one in batch]),
        **effort(batch),
    }


def effort(batch: Sequence[Facts]) -> dict[str, float]:
    """What trajectories of any workflow took, and how they ended."""
    lengths = [tokens for one in batch for tokens in one.tokens_of_turns]
    counted = sorted({name for one in batch for name in one.counts})
    return {
        Name.TURNS: _mean([one.turns for one in batch]),
        Name.TOKENS_PER_TURN: _mean(lengths),
        "peak_context_tokens": float(max(lengths, default=0)),
        **{name: _mean([one.counts.get(name, 0) for one in batch]) for name in counted},
        **{f"stop/{stop.value}": _mean([one.stop is stop for one in batch]) for stop in Stop},
    }


def _by_hops(batch: Sequence[Facts]) -> dict[str, float]:
    """Exact match by the number of facts that a question needs, where the data says it."""
    right: dict[int, list[float]] = {}
    for one in batch:
        if one.hops is not None:
            right.setdefault(one.hops, []).append(one.scores[Name.EXACT_MATCH])
    return {f"{Name.EXACT_MATCH}/{hops}_hops": _mean(values) for hops, values in sorted(right.items())}


def spread(reward_R: Sequence[float], group_R: Sequence[int]) -> float:
    """Share of the groups whose rewards differ: only they move the policy. NaN is no reward."""
    groups: dict[int, set[float]] = {}
    for value, group in zip(reward_R, group_R, strict=True):
        groups.setdefault(group, set()).update([] if math.isnan(value) else [value])
    return _mean([len(values) > 1 for values in groups.values()])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
