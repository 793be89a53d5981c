"""What one host has sampled in a step, and its exchange with the other hosts.

Every host gets the examples of all hosts and packs them with the same draws: so rows and mini-batches agree without
further messages, and a run learns the same on any number of hosts. For a step of the paper's batch this is some hundred
megabytes, while an update takes minutes. The texts of trajectories are not exchanged here: see `recorder`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from memsearcher_jax.hosts.distributed import Hosts
from memsearcher_jax.logs.trajectories import decode, summarize_trajectory
from memsearcher_jax.rl.advantages import mixed_groups, multi_context_advantages
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.rl.metrics import RolloutStats
from memsearcher_jax.sampling.scheduler import SamplerStats
from memsearcher_jax.training.config import TrainOn
from memsearcher_jax.training.packing import TrainingExample
from memsearcher_jax.types import ScoredTrajectory, TrajectorySummary

TOKEN_DTYPES = {"ids": np.int32, "logprobs": np.float32, "sampled": np.bool_}
"""The fields of a TrainingExample with an entry for each token. Those of all examples travel as one array."""
SCALAR_DTYPES = {"advantage": np.float64, "number": np.int32, "correct": np.bool_, "version": np.int32}
"""The fields of a TrainingExample with one entry in all."""


@dataclass(frozen=True)
class RolloutBatch:
    """The rollouts of some of a step's problems, in the order of the problems."""

    examples: Sequence[TrainingExample]
    summaries: Sequence[TrajectorySummary]  # one for each trajectory
    stats: RolloutStats = field(default_factory=RolloutStats)
    scored: Sequence[ScoredTrajectory] = ()  # of this host, to be written
    metrics: Mapping[str, float] = field(default_factory=dict)

    def mixed_groups(self, group_size: int) -> list[bool]:
        """For each group, whether the rewards of its trajectories differ."""
        return mixed_groups([summary.reward for summary in self.summaries], _groups(self.summaries, group_size))


def make_rollout_batch(
    scored: Sequence[ScoredTrajectory], stats: RolloutStats, settings: RLConfig, train_on: TrainOn = "all"
) -> RolloutBatch:
    """The batch of one host's trajectories, G of each problem."""
    examples = multi_context_advantages(scored, _groups(scored, settings.group_size), settings, train_on)
    summaries = [summarize_trajectory(trajectory) for trajectory in scored]
    return RolloutBatch(examples, summaries, stats, scored)


def _groups(trajectories: Sequence[Any], group_size: int) -> list[int]:
    """The group of each trajectory; those of a problem are adjacent."""
    return [index // group_size for index in range(len(trajectories))]


def exchange(hosts: Hosts, batch: RolloutBatch | None) -> RolloutBatch:
    """The batches of all hosts as one, on each of them, but for `scored`.

    Raises RunEnded on all of them if one host gives None.
    """
    if hosts.count == 1 and batch is not None:
        return batch
    batches = hosts.exchange(None if batch is None else to_bytes(batch))
    if batches is None or batch is None:
        raise hosts.ended()
    return replace(concatenate([from_bytes(content) for content in batches]), scored=batch.scored)


def concatenate(
    batches: Sequence[RolloutBatch], combine_seconds: Callable[[Iterable[float]], float] = max
) -> RolloutBatch:
    """One batch out of several, in this order. Hosts sample concurrently, so the slowest one's seconds count."""
    examples = [example for batch in batches for example in batch.examples]
    summaries = [summary for batch in batches for summary in batch.summaries]
    scored = [trajectory for batch in batches for trajectory in batch.scored]
    stats = _joined([batch.stats for batch in batches], combine_seconds)
    return RolloutBatch(examples, summaries, stats, scored)


def _joined(parts: Sequence[RolloutStats], combine_seconds: Callable[[Iterable[float]], float]) -> RolloutStats:
    latencies = tuple(latency for stats in parts for latency in stats.search_latencies)
    device_memory = {}
    for name in parts[0].device_memory:
        device_memory[name] = max(stats.device_memory[name] for stats in parts)
    return RolloutStats(
        sampler=sum((stats.sampler for stats in parts), SamplerStats()),
        seconds=combine_seconds(stats.seconds for stats in parts),
        search_latencies=latencies,
        device_memory=device_memory,
        interrupted_tokens=sum(stats.interrupted_tokens for stats in parts),
    )


def to_bytes(batch: RolloutBatch) -> bytes:
    """Plain arrays and JSON, nothing that could run.

    `from_bytes` gives the same batch back to the bit, without `scored`.
    """
    summaries = [asdict(summary) | {"stop": summary.stop.value} for summary in batch.summaries]
    texts = {"summaries": summaries, "stats": asdict(batch.stats)}
    arrays: dict[str, np.ndarray] = {
        "texts": np.frombuffer(json.dumps(texts).encode(), np.uint8),
        "lengths": np.array([len(example.ids) for example in batch.examples], np.int64),
    }
    for name, dtype in TOKEN_DTYPES.items():
        of_examples = [np.asarray(getattr(example, name), dtype) for example in batch.examples]
        arrays[name] = np.concatenate([np.zeros(0, dtype), *of_examples])
    memories = [example.memory for example in batch.examples if example.memory is not None]
    if memories:
        assert len(memories) == len(batch.examples), "all contexts of a run tell memories apart, or none does"
        arrays["memory"] = np.concatenate(memories)
    for name, dtype in SCALAR_DTYPES.items():
        arrays[name] = np.array([getattr(example, name) for example in batch.examples], dtype)
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    return content.getvalue()


def from_bytes(content: bytes) -> RolloutBatch:
    """The inverse of `to_bytes`. The arrays of the examples are views of those of the whole batch."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        texts = json.loads(arrays["texts"].tobytes())
        ends = np.cumsum(arrays["lengths"])
        tokens = {name: arrays[name] for name in (*TOKEN_DTYPES, "memory") if name in arrays}
        scalars = {name: arrays[name].tolist() for name in SCALAR_DTYPES}  # as Python's numbers

    examples = []
    begin = 0
    for number, end in enumerate(ends.tolist()):
        own_tokens = {name: values[begin:end] for name, values in tokens.items()}
        own_scalars = {name: values[number] for name, values in scalars.items()}
        examples.append(TrainingExample(**own_tokens, **own_scalars))
        begin = end
    summaries = [decode(TrajectorySummary, fields) for fields in texts["summaries"]]
    return RolloutBatch(examples, summaries, decode(RolloutStats, texts["stats"]))
