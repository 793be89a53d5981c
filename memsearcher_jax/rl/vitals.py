"""What a rollout took: tokens, slots that had nothing to do, waits for searches, memory of the devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from memsearcher_jax.report.names import Name
from memsearcher_jax.sampling.ledger import Counters

if TYPE_CHECKING:
    from memsearcher_jax.rl.part import Part


def vitals(part: Part) -> dict[str, float]:
    """The numbers of what all hosts have sampled for a step."""
    return sampler_numbers(part.counters, part.seconds) | search_numbers(part.waited) | part.memory


def sampler_numbers(counters: Counters, seconds: float) -> dict[str, float]:
    """What the sampler did."""
    return {
        Name.TOKENS_PER_SECOND: counters.generated_tokens / seconds,
        Name.IDLE_SLOT_SHARE: counters.idle_share,
        "generated_tokens": float(counters.generated_tokens),
        "standing_tokens": float(counters.standing_tokens),
        "prefilled_tokens": float(counters.prefilled_tokens),
        "reused_share": counters.reused_share,
    }


def search_numbers(waited: Sequence[float]) -> dict[str, float]:
    """Seconds from a question to its answer, as a trajectory waits for it. Nothing where nobody searched."""
    if not waited:
        return {}
    return {Name.SEARCH_SECONDS: float(np.mean(waited)), Name.SEARCH_SECONDS_95: float(np.percentile(waited, 95))}


def memory_numbers(devices: Sequence[dict[str, int] | None]) -> dict[str, float]:
    """GB of the fullest device, as `Device.memory_stats` tells them. Nothing for devices that do not: CPU's."""
    told = [stats for stats in devices if stats]
    if not told:
        return {}
    most = {name: max(stats[name] for stats in told) / 1e9 for name in ("bytes_in_use", "peak_bytes_in_use")}
    return {Name.DEVICE_GB: most["bytes_in_use"], Name.DEVICE_PEAK_GB: most["peak_bytes_in_use"]}
