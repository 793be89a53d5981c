"""Settings of supervised learning on recorded trajectories. No JAX here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memsearcher_jax.ranges import Count, CountOrZero, Finite, Probability


@dataclass(frozen=True)
class SFTConfig:
    """Supervised learning (launch/sft.py): which recorded trajectories to imitate, and how often."""

    trajectories: tuple[str, ...] = ()
    """What to train on: trajectory files (.jsonl.gz or .jsonl), folders of them, or run directories. Every agent's
    files will do; the model must have the tokenizer that they were recorded with."""
    min_reward: Finite = 0.0
    """Lowest reward of a trajectory to train on. Those without a reward, which a fault ended, are never trained."""
    keep: Literal["all", "best"] = "all"
    """Of each problem, train on all trajectories or on those with its highest reward (rejection sampling)."""
    trajectories_per_step: CountOrZero = 256
    """Trajectories per step, in an order that the seed decides. 0: each step trains one file, in the files' order."""
    epochs: Count = 1
    """Passes over the trajectories; they decide the number of steps."""
    held_out: tuple[str, ...] = ()
    """Trajectories to measure and never to train on, in the same form; they are not filtered by reward."""
    held_out_share: Probability = 0.05
    """Without held_out: the share of the problems whose trajectories are only measured."""
    measure_every: Count = 10
    """Steps between measurements of the held-out trajectories."""
