"""What one host has sampled in a step, and its exchange with the other hosts.

Every host gets the examples of all hosts and packs them with the same draws: so rows and mini-batches agree without
further messages, and a run learns the same on any number of hosts. For a step of the paper's batch this is some hundred
megabytes, while an update takes minutes. Trajectories travel compressed, only to be written by the first host.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from memsearcher_jax.hosts.distributed import Hosts
from memsearcher_jax.logs.trajectories import compress_trajectories, decode, summarize_trajectory
from memsearcher_jax.rl.advantages import mixed_groups, multi_context_advantages
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.rl.metrics import RolloutStats
from memsearcher_jax.sampling.scheduler import SamplerStats
from memsearcher_jax.training.packing import TrainingExample
from memsearcher_jax.types import ScoredTrajectory, TrajectorySummary

TOKEN_FIELDS = {"ids": np.int32, "logprobs": np.float32, "sampled": np.bool_}
FIELDS = {"advantage": np.float64, "number": np.int32, "correct": np.bool_, "version": np.int32}
"""Of a TrainingExample, as they travel: with an entry for each token, or one in all."""


@dataclass(frozen=True)
class RolloutBatch:
    """The rollouts of some of a step's problems, in the order of the problems."""

    examples: Sequence[TrainingExample]
    summaries: Sequence[TrajectorySummary]  # one for each trajectory
    stats: RolloutStats = field(default_factory=RolloutStats)
    trajectories: bytes = b""  # a trajectory file, as `logs.trajectories` writes it; empty if none are kept
    metrics: Mapping[str, float] = field(default_factory=dict)

    def mixed_groups(self, group_size: int) -> list[bool]:
        """For each group, whether the rewards of its trajectories differ."""
        return mixed_groups([one.reward for one in self.summaries], _groups(self.summaries, group_size))


def make_rollout_batch(scored: Sequence[ScoredTrajectory], stats: RolloutStats, settings: RLConfig) -> RolloutBatch:
    """The batch of one host's trajectories, G of each problem."""
    examples = multi_context_advantages(scored, _groups(scored, settings.group_size), settings)
    trajectories = compress_trajectories(scored) if settings.save_trajectories else b""
    return RolloutBatch(examples, list(map(summarize_trajectory, scored)), stats, trajectories)


def _groups(trajectories: Sequence[Any], group_size: int) -> list[int]:
    """The group of each trajectory; those of a problem are adjacent."""
    return [index // group_size for index in range(len(trajectories))]


def exchange(hosts: Hosts, batch: RolloutBatch | None) -> RolloutBatch:
    """The batches of all hosts as one, on each of them. Raises RunEnded on all of them if one host gives None."""
    if hosts.count == 1 and batch is not None:
        return batch
    batches = hosts.exchange(None if batch is None else to_bytes(batch))
    if batches is None:
        raise hosts.ended()
    return concatenate(list(map(from_bytes, batches)))


def concatenate(
    batches: Sequence[RolloutBatch], combine_seconds: Callable[[Iterable[float]], float] = max
) -> RolloutBatch:
    """One batch out of several, in this order. Hosts sample concurrently, so the slowest one's seconds count."""
    stats = [batch.stats for batch in batches]
    return RolloutBatch(
        [example for batch in batches for example in batch.examples],
        [summary for batch in batches for summary in batch.summaries],
        RolloutStats(
            sum((one.sampler for one in stats), SamplerStats()),
            combine_seconds(one.seconds for one in stats),
            tuple(latency for one in stats for latency in one.search_latencies),
            {name: max(one.device_memory[name] for one in stats) for name in stats[0].device_memory},
            sum(one.interrupted_tokens for one in stats),
        ),
        b"".join(batch.trajectories for batch in batches),
    )


def to_bytes(batch: RolloutBatch) -> bytes:
    """Plain arrays and JSON, nothing that could run; `from_bytes` gives the same batch back to the bit."""
    texts = {
        "summaries": [asdict(one) | {"stop": one.stop.value} for one in batch.summaries],
        "stats": asdict(batch.stats),
    }
    arrays: dict[str, Any] = {
        "texts": np.frombuffer(json.dumps(texts).encode(), np.uint8),
        "trajectories": np.frombuffer(batch.trajectories, np.uint8),
    }
    for name, dtype in TOKEN_FIELDS.items():
        values = [np.asarray(getattr(example, name), dtype) for example in batch.examples]
        arrays[name] = np.concatenate([np.zeros(0, dtype), *values])
        arrays[f"{name}_lengths"] = np.array(list(map(len, values)), np.int64)
    for name, dtype in FIELDS.items():
        arrays[name] = np.array([getattr(example, name) for example in batch.examples], dtype)
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


def from_bytes(content: bytes) -> RolloutBatch:
    """The inverse of `to_bytes`."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        texts = json.loads(arrays["texts"].tobytes())
        ends = {name: np.cumsum(arrays[f"{name}_lengths"]) for name in TOKEN_FIELDS}
        fields = {name: np.split(arrays[name], ends[name])[:-1] for name in TOKEN_FIELDS}
        fields |= {name: arrays[name].tolist() for name in FIELDS}
        examples = [
            TrainingExample(**dict(zip(fields, one, strict=True))) for one in zip(*fields.values(), strict=True)
        ]
        trajectories = arrays["trajectories"].tobytes()
    summaries = [decode(TrajectorySummary, one) for one in texts["summaries"]]
    return RolloutBatch(examples, summaries, decode(RolloutStats, texts["stats"]), trajectories)
