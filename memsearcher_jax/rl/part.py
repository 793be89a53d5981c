"""What one host has sampled of a step, on its way to the others.

Every host gets everybody's samples and packs them all, by the same draws: so the rows, their number and the order of
mini-batches are agreed without a word, no host fills up with empty rows because its trajectories were short, and a run
learns the same whatever the number of its hosts. Of a step of the paper's batch that is some hundred megabytes, which
cross the network once while an update takes minutes. Trajectories themselves travel packed, and only to be written.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field, replace

import jax
import numpy as np

from memsearcher_jax.agent.types import Stop
from memsearcher_jax.report.page_facts import Facts, facts_of
from memsearcher_jax.report.trajectories import Scored, packed
from memsearcher_jax.rl.assemble import samples_of
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.rl.hosts import Hosts
from memsearcher_jax.rl.rollout import RolloutDriver
from memsearcher_jax.rl.score import spread
from memsearcher_jax.rl.vitals import memory_numbers
from memsearcher_jax.sampling.ledger import Counters
from memsearcher_jax.training.rows import Sample


@dataclass(frozen=True)
class Part:
    """What came of some of a step's problems, in their order."""

    samples: Sequence[Sample]
    facts: Sequence[Facts]  # one for each trajectory
    counters: Counters = field(default_factory=Counters)  # of the sampler
    seconds: float = 0.0  # that the sampler took
    waited: Sequence[float] = ()  # for each search, in seconds
    memory: dict[str, float] = field(default_factory=dict)  # see `memory_numbers`
    packed: bytes = b""  # the trajectories, as `report.trajectories.packed` has them; empty if none are kept


def part_of(batch: Sequence[Scored], settings: RLConfig, driver: RolloutDriver, seconds: float) -> Part:
    """What a batch of whole groups, the rollouts of a problem side by side, teaches and tells.

    `driver` has just sampled it, in so many seconds.
    """
    groups = [index // settings.rollouts for index in range(len(batch))]
    return Part(
        samples_of(batch, groups, settings),
        [facts_of(one) for one in batch],
        replace(driver.engine.counters),
        seconds,
        list(driver.waited),
        memory_numbers([one.memory_stats() for one in jax.local_devices()]),
        packed(batch) if settings.save_trajectories else b"",
    )


def spread_of(part: Part, settings: RLConfig) -> float:
    """Share of the groups whose rewards differ."""
    rewards = [one.reward for one in part.facts]
    return spread(rewards, [index // settings.rollouts for index in range(len(rewards))])


def gather(hosts: Hosts, own: Part | None) -> Part | None:
    """The parts of all hosts as one, on each of them; None, on all of them, if one gives None."""
    if hosts.count == 1:
        return own
    parts = hosts.exchange(None if own is None else to_bytes(own))
    return None if parts is None else join([from_bytes(part) for part in parts])


def join(parts: Sequence[Part]) -> Part:
    """One part out of several, in this order. They were sampled side by side, so the slowest one's time counts."""
    counters = zip(*(astuple(part.counters) for part in parts), strict=True)
    return Part(
        [sample for part in parts for sample in part.samples],
        [one for part in parts for one in part.facts],
        Counters(*map(sum, counters)),
        max(part.seconds for part in parts),
        [seconds for part in parts for seconds in part.waited],
        {name: max(part.memory[name] for part in parts) for name in parts[0].memory},
        b"".join(part.packed for part in parts),
    )


def to_bytes(part: Part) -> bytes:
    """What `from_bytes` makes the same part of, to the bit. Plain arrays and JSON, nothing that could run."""
    told = {
        "facts": [asdict(one) | {"stop": one.stop.value} for one in part.facts],
        "counters": astuple(part.counters),
        "seconds": part.seconds,
        "waited": list(part.waited),
        "memory": part.memory,
    }
    content = io.BytesIO()
    np.savez(
        content,
        told=np.frombuffer(json.dumps(told).encode(), np.uint8),
        packed=np.frombuffer(part.packed, np.uint8),
        length_C=np.array([len(sample.ids) for sample in part.samples], np.int64),
        advantage_C=np.array([sample.advantage for sample in part.samples], np.float64),
        ids=_row([sample.ids for sample in part.samples], np.int32),
        logprobs=_row([sample.logprobs for sample in part.samples], np.float32),
        sampled=_row([sample.sampled for sample in part.samples], np.bool_),
    )
    return content.getvalue()


def from_bytes(content: bytes) -> Part:
    """The inverse of `to_bytes`."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        told = json.loads(arrays["told"].tobytes())
        ends = np.cumsum(arrays["length_C"])[:-1]
        columns = (np.split(arrays[name], ends) for name in ("ids", "logprobs", "sampled"))
        advantages = arrays["advantage_C"].tolist()
        samples = [Sample(*one) for one in zip(*columns, advantages, strict=True)] if advantages else []
        packed = arrays["packed"].tobytes()
    facts = [
        Facts(**(one | {"stop": Stop(one["stop"]), "tokens_of_turns": tuple(one["tokens_of_turns"])}))
        for one in told["facts"]
    ]
    return Part(samples, facts, Counters(*told["counters"]), told["seconds"], told["waited"], told["memory"], packed)


def _row(arrays: Sequence[Sequence], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(one, dtype) for one in arrays]) if arrays else np.zeros(0, dtype)
