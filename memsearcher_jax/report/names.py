"""The names of the metrics that displays and plots look for; whoever measures one writes it under this name."""

from __future__ import annotations

from enum import StrEnum

PHASE_PREFIX = "seconds/"
"""Wall-clock seconds of one phase of a step, such as seconds/rollout and seconds/update."""
STOP_PREFIX = "stop/"
"""Share of the trajectories that ended for one reason, such as stop/answered."""


class Name(StrEnum):
    REWARD = "reward"
    EXACT_MATCH = "exact_match"
    ENTROPY = "entropy"
    KL = "kl"  # k3 divergence from the starting weights, nats per token
    APPROXIMATE_KL = "approximate_kl"  # mean of old - new log-probability over the step's updates, nats per token
    TURNS = "turns"  # mean over trajectories
    TOKENS_PER_TURN = "tokens_per_turn"  # in context when a turn ends, mean over turns
    MEMORY_TOKENS = "memory_tokens"  # of the last memory, mean over trajectories
    TOKENS_PER_SECOND = "tokens_per_second"  # sampled by the policy, over the rollout's wall clock
    IDLE_SLOT_SHARE = "idle_slot_share"  # of the sampler's slots, over the ticks of a rollout
    SEARCH_SECONDS = "search_seconds"  # from a question to its answer, mean over the searches of a rollout
    SEARCH_SECONDS_95 = "search_seconds_95"  # likewise, what 95 of 100 stay below
    DEVICE_GB = "device_gb"  # memory in use on the fullest device after a rollout; CPUs tell none
    DEVICE_PEAK_GB = "device_peak_gb"  # likewise, the most since the start
    PASSAGES_PER_SECOND = "passages_per_second"  # embedded while an index is built
    LOGPROB_DIFFERENCE = "logprob_difference"  # mean |sampler - trainer| over the policy's tokens
