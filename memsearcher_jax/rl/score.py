"""Scores of trajectories, and what a batch of them looks like in numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memsearcher_jax.agent import reward
from memsearcher_jax.agent.types import Stop, Trajectory
from memsearcher_jax.report.names import Name
from memsearcher_jax.report.trajectories import Scored
from memsearcher_jax.sampling.ledger import Counters


def scored(trajectory: Trajectory) -> Scored:
    """The training reward, and the metrics of the answer (0 where there is none)."""
    golden = trajectory.problem.golden_answers
    earned = reward.score(trajectory.outcome, trajectory.transcript, golden)
    answer = trajectory.outcome.answer
    answered = trajectory.outcome.stop is Stop.ANSWERED
    metrics = {"exact_match": reward.exact_match, "f1": reward.token_f1, "cover_exact_match": reward.cover_exact_match}
    scores = {name: metric(answer, golden) if answered else 0.0 for name, metric in metrics.items()}
    return Scored(trajectory, earned.value, earned.reason, scores)


def summarise(batch: Sequence[Scored]) -> dict[str, float]:
    """Means over trajectories; per-turn numbers are means over contexts; `stop/` are shares of the trajectories."""
    trajectories = [one.trajectory for one in batch]
    outcomes = [trajectory.outcome for trajectory in trajectories]
    lengths = [len(context.ids) for trajectory in trajectories for context in trajectory.contexts]
    summary = {
        Name.REWARD: _mean([one.reward for one in batch]),
        **{name: _mean([one.scores[name] for one in batch]) for name in batch[0].scores},
        **_by_hops(batch),
        Name.TURNS: _mean([len(outcome.turns) for outcome in outcomes]),
        "searches": _mean([sum(len(turn.queries) for turn in outcome.turns) for outcome in outcomes]),
        Name.TOKENS_PER_TURN: _mean(lengths),
        "peak_context_tokens": float(max(lengths, default=0)),
    }
    counted = sorted({name for outcome in outcomes for name in outcome.counts})
    summary |= {name: _mean([outcome.counts.get(name, 0) for outcome in outcomes]) for name in counted}
    return summary | {f"stop/{stop.value}": _mean([outcome.stop is stop for outcome in outcomes]) for stop in Stop}


def _by_hops(batch: Sequence[Scored]) -> dict[str, float]:
    """Exact match by the number of facts that a question needs, where the data says it."""
    right: dict[int, list[float]] = {}
    for one in batch:
        if (hops := one.trajectory.problem.metadata.get("hops")) is not None:
            right.setdefault(hops, []).append(one.scores[Name.EXACT_MATCH])
    return {f"{Name.EXACT_MATCH}/{hops}_hops": _mean(values) for hops, values in sorted(right.items())}


def spread(reward_R: Sequence[float], group_R: Sequence[int]) -> float:
    """Share of the groups whose rewards differ: only they move the policy."""
    groups: dict[int, set[float]] = {}
    for value, group in zip(reward_R, group_R, strict=True):
        groups.setdefault(group, set()).add(value)
    return _mean([len(values) > 1 for values in groups.values()])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def sampler_numbers(counters: Counters, seconds: float) -> dict[str, float]:
    """What the sampler did in one rollout that took so many seconds."""
    return {
        Name.TOKENS_PER_SECOND: counters.generated_tokens / seconds,
        "generated_tokens": float(counters.generated_tokens),
        "standing_tokens": float(counters.standing_tokens),
        "prefilled_tokens": float(counters.prefilled_tokens),
        "reused_share": counters.reused_share,
    }
