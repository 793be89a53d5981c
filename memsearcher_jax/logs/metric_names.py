"""Metric names that the progress display, the plots and the health monitor read."""

from __future__ import annotations

from enum import StrEnum

PHASE_PREFIX = "time/"
"""Wall-clock seconds of one phase of a step, such as time/rollout and time/update."""
STOP_PREFIX = "stop/"
"""Fraction of trajectories with one stop reason, such as stop/answered."""


class MetricName(StrEnum):
    REWARD = "reward"
    UNSCORED = "unscored"  # fraction of trajectories without a reward: lost to faults of the machinery
    EXACT_MATCH = "exact_match"
    ACCURACY = "accuracy"  # of the questions about a stream, mean over streams
    ENTROPY = "entropy"
    KL = "kl"  # k3 divergence from the initial weights, nats per token
    APPROX_KL = "approx_kl"  # mean of old - new log-probability over the step's updates, nats per token
    CORRECT_LOGPROB = "correct_logprob"  # of the tokens of trajectories with a right answer, mean; nats per token
    TURNS = "turns"  # mean over trajectories
    TOKENS_PER_TURN = "tokens_per_turn"  # in context at the end of a turn, mean over turns
    MEMORY_TOKENS = "memory_tokens"  # of the last memory, mean over trajectories
    TOKENS_PER_SECOND = "tokens_per_second"  # sampled by the policy, over the rollout's wall-clock time
    IDLE_SLOT_SHARE = "idle_slot_share"  # fraction of the sampler's slots, over the steps of a rollout
    HOST_WAIT = "host_wait"  # seconds of a rollout in which the sampler had work and no call was under way
    SEARCH_LATENCY = "search_latency"  # seconds from request to response, mean over the searches of a rollout
    SEARCH_LATENCY_P95 = "search_latency_p95"  # 95th percentile of the same
    DEVICE_GB = "device_gb"  # memory in use on the fullest device after a rollout; absent on CPU
    DEVICE_PEAK_GB = "device_peak_gb"  # peak of the same since the start
    HOST_PEAK_GB = "host_peak_gb"  # largest resident memory of the first host's process in a step; absent off Linux
    PASSAGES_PER_SECOND = "passages_per_second"  # encoded while an index is built
    QUESTIONS = "questions"  # made of passages that passed all filters, those of earlier calls included
    LOGPROB_DIFF_MEAN = "logprob_diff_mean"  # mean |sampler - trainer| over the policy's tokens
