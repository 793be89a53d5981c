"""Metrics of a step: scores of its trajectories, and the cost of their rollout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from memsearcher_jax.agent.base import Agent
from memsearcher_jax.logs.metric_names import MetricName
from memsearcher_jax.sampling.scheduler import SamplerStats
from memsearcher_jax.types import StopReason, TrajectorySummary

Metrics = dict[str, float]


@dataclass(frozen=True)
class RolloutStats:
    """What one host measured during a rollout."""

    sampler: SamplerStats = field(default_factory=SamplerStats)
    seconds: float = 0.0  # of wall clock
    search_latencies: tuple[float, ...] = ()  # seconds from each search request to its results
    device_memory: dict[str, float] = field(default_factory=dict)  # see `device_memory`
    interrupted_tokens: int = 0  # sampled, of contexts that the end of the rollout cut off: they are sampled again


def trajectory_metrics(summaries: Sequence[TrajectorySummary], agent: Agent) -> dict[str, float]:
    """Rewards and scores of a batch, over the trajectories that were not lost, what they took, and how they ended."""
    numbers = [agent.numbers(one) for one in summaries]
    names = dict.fromkeys(name for one in numbers for name in one)
    scores, effort = _scores(summaries) | _exact_match_by_hops(summaries), _effort(summaries)
    if taken := sorted((scores | effort).keys() & names):
        raise ValueError(f"the agent's number {taken[0]} has the name of another metric: rename it")
    return scores | {name: _mean([one[name] for one in numbers if name in one]) for name in names} | effort


def rollout_metrics(stats: RolloutStats) -> dict[str, float]:
    """Tokens, idle slots, search latency and device memory of a rollout; of several hosts, joined."""
    sampler = stats.sampler
    latencies = {}
    if stats.search_latencies:
        latencies = {
            MetricName.SEARCH_LATENCY: float(np.mean(stats.search_latencies)),
            MetricName.SEARCH_LATENCY_P95: float(np.percentile(stats.search_latencies, 95)),
        }
    return {
        MetricName.TOKENS_PER_SECOND: sampler.generated_tokens / stats.seconds,
        MetricName.IDLE_SLOT_SHARE: sampler.idle_slot_share,
        "generated_tokens": float(sampler.generated_tokens),
        "appended_tokens": float(sampler.appended_tokens),
        "prefilled_tokens": float(sampler.prefilled_tokens),
        "prefix_hit_rate": sampler.prefix_hit_rate,
        "preemptions": float(sampler.preempted),
        "recomputed_tokens": float(sampler.recomputed_tokens),
        **latencies,
        **stats.device_memory,
    }


def staleness_metrics(summaries: Sequence[TrajectorySummary], step: int, stats: RolloutStats) -> dict[str, float]:
    """Metrics of a step that trains trajectories which it, or an earlier step, has sampled.

    `staleness/K`: fraction of the contexts whose policy had K steps less than the one that is trained;
    `mixed_policy`: fraction of the trajectories whose contexts have several policies; `interrupted_tokens`: those
    that the rollout generated in contexts which it did not finish.
    """
    staleness = Counter(step - version for one in summaries for version in one.versions)
    return {
        **{f"staleness/{steps}": count / staleness.total() for steps, count in sorted(staleness.items())},
        "staleness": sum(steps * count for steps, count in staleness.items()) / max(1, staleness.total()),
        "mixed_policy": _mean([len(set(one.versions)) > 1 for one in summaries]),
        "interrupted_tokens": float(stats.interrupted_tokens),
    }


def device_memory(memory_stats: Sequence[dict[str, int] | None]) -> dict[str, float]:
    """GB of the fullest device, from `Device.memory_stats`; without what the devices do not report: CPUs nothing."""
    names = {MetricName.DEVICE_GB: "bytes_in_use", MetricName.DEVICE_PEAK_GB: "peak_bytes_in_use"}
    return {
        metric: max(known) / 1e9
        for metric, name in names.items()
        if (known := [stats[name] for stats in memory_stats if stats and name in stats])
    }


def _scores(summaries: Sequence[TrajectorySummary]) -> dict[str, float]:
    """Means over the trajectories that have a value; `unscored` is a fraction of all."""
    names = dict.fromkeys(name for one in summaries for name in one.scores)
    return {
        MetricName.REWARD: _known_mean([one.reward for one in summaries]),
        **{name: _known_mean([one.scores.get(name, math.nan) for one in summaries]) for name in names},
        MetricName.UNSCORED: _mean([math.isnan(one.reward) for one in summaries]),
    }


def _effort(summaries: Sequence[TrajectorySummary]) -> dict[str, float]:
    """The cost of trajectories of any workflow, and how they ended. Per-turn numbers are means over turns, `stop/` are
    fractions of the trajectories."""
    lengths = [tokens for one in summaries for tokens in one.context_lengths]
    names = sorted({name for one in summaries for name in one.counts})
    calls, succeeded = (sum(one.counts.get(name, 0) for one in summaries) for name in ("calls", "calls_ok"))
    return {
        MetricName.TURNS: _mean([one.turns for one in summaries]),
        MetricName.TOKENS_PER_TURN: _mean(lengths),
        "peak_context_tokens": float(max(lengths, default=0)),
        **{name: _mean([one.counts.get(name, 0) for one in summaries]) for name in names},
        **{f"stop/{stop.value}": _mean([one.stop is stop for one in summaries]) for stop in StopReason},
        **({"calls_ok_share": succeeded / max(1, calls)} if "calls_ok" in names else {}),
    }


def _exact_match_by_hops(summaries: Sequence[TrajectorySummary]) -> dict[str, float]:
    """Exact match by the number of facts that a question needs, where the data says it."""
    values: dict[int, list[float]] = {}
    for one in summaries:
        if one.hops is not None and MetricName.EXACT_MATCH in one.scores:
            values.setdefault(one.hops, []).append(one.scores[MetricName.EXACT_MATCH])
    return {f"{MetricName.EXACT_MATCH}/{hops}_hops": _mean(scores) for hops, scores in sorted(values.items())}


def _known_mean(values: Sequence[float]) -> float:
    """Mean of the values that are numbers; NaN where none is."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
