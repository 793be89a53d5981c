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
TEST_PREFIX = "test/"  # of the metrics of an evaluation
STOP_PREFIX = "stop/"  # of the fraction of trajectories that ended for a reason


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
    scores = _scores(summaries) | _exact_match_by_hops(summaries)
    effort = _effort(summaries)
    values = dict[str, list[float]]()  # of the agent's own numbers
    for summary in summaries:
        for name, value in agent.numbers(summary).items():
            values.setdefault(name, []).append(value)
    taken = sorted(values.keys() & (scores | effort).keys())
    if taken:
        raise ValueError(f"the agent's number {taken[0]} has the name of another metric: rename it")
    return scores | {name: _mean(of_trajectories) for name, of_trajectories in values.items()} | effort


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
        MetricName.HOST_WAIT: stats.seconds * sampler.host_wait_share,
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
    contexts = Counter[int]()  # by staleness
    for summary in summaries:
        contexts.update(step - version for version in summary.versions)
    shares = {f"staleness/{steps}": count / contexts.total() for steps, count in sorted(contexts.items())}
    total_staleness = sum(steps * count for steps, count in contexts.items())
    return {
        **shares,
        "staleness": total_staleness / max(1, contexts.total()),
        "mixed_policy": _mean([len(set(summary.versions)) > 1 for summary in summaries]),
        "interrupted_tokens": float(stats.interrupted_tokens),
    }


def device_memory(memory_stats: Sequence[dict[str, int] | None]) -> dict[str, float]:
    """GB of the fullest device, from `Device.memory_stats`; without what the devices do not report: CPUs nothing."""
    names = {MetricName.DEVICE_GB: "bytes_in_use", MetricName.DEVICE_PEAK_GB: "peak_bytes_in_use"}
    fullest = {}
    for metric, name in names.items():
        reported = [stats[name] for stats in memory_stats if stats and name in stats]
        if reported:
            fullest[metric] = max(reported) / 1e9
    return fullest


def _scores(summaries: Sequence[TrajectorySummary]) -> dict[str, float]:
    """Means over the trajectories that have a value; `unscored` is a fraction of all."""
    metrics: dict[str, float] = {MetricName.REWARD: _known_mean([summary.reward for summary in summaries])}
    names = dict.fromkeys(name for summary in summaries for name in summary.scores)
    for name in names:
        metrics[name] = _known_mean([summary.scores.get(name, math.nan) for summary in summaries])
    metrics[MetricName.UNSCORED] = _mean([math.isnan(summary.reward) for summary in summaries])
    return metrics


def _effort(summaries: Sequence[TrajectorySummary]) -> dict[str, float]:
    """The cost of trajectories of any workflow, and how they ended.

    Per-turn numbers are means over turns, `stop/` are fractions of the trajectories.
    """
    lengths = [tokens for summary in summaries for tokens in summary.context_lengths]
    metrics: dict[str, float] = {
        MetricName.TURNS: _mean([summary.turns for summary in summaries]),
        MetricName.TOKENS_PER_TURN: _mean(lengths),
        "peak_context_tokens": float(max(lengths, default=0)),
    }
    names = sorted({name for summary in summaries for name in summary.counts})
    for name in names:
        metrics[name] = _mean([summary.counts.get(name, 0) for summary in summaries])
    for stop in StopReason:
        metrics[f"{STOP_PREFIX}{stop.value}"] = _mean([summary.stop is stop for summary in summaries])
    if "calls_ok" in names:
        calls = sum(summary.counts.get("calls", 0) for summary in summaries)
        succeeded = sum(summary.counts.get("calls_ok", 0) for summary in summaries)
        metrics["calls_ok_share"] = succeeded / max(1, calls)
    return metrics


def _exact_match_by_hops(summaries: Sequence[TrajectorySummary]) -> dict[str, float]:
    """Exact match by the number of facts that a question needs, where the data says it."""
    values: dict[int, list[float]] = {}
    for summary in summaries:
        if summary.hops is not None and MetricName.EXACT_MATCH in summary.scores:
            values.setdefault(summary.hops, []).append(summary.scores[MetricName.EXACT_MATCH])
    return {f"{MetricName.EXACT_MATCH}/{hops}_hops": _mean(scores) for hops, scores in sorted(values.items())}


def _known_mean(values: Sequence[float]) -> float:
    """Mean of the values that are numbers; NaN where none is."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
