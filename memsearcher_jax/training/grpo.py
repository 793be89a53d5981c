"""Group-relative advantages and the clipped policy loss, as pure functions of arrays.

GRPO: Shao et al. 2024, "DeepSeekMath", section 4.1. Multi-context GRPO (MemSearcher), which gives every context of a
trajectory the trajectory's advantage, is `rl.advantages`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from memsearcher_jax.training import masked
from memsearcher_jax.training.config import Aggregate, TrainingConfig

# Bound on log-ratios before exp. A ratio of e^20 is far outside every clip range, so the bound changes neither the
# loss nor its gradient; without it exp overflows, and the gradient of a clipped inf is NaN.
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0  # per token, as in the reference implementation


def group_advantages(
    reward_R: np.ndarray | jax.Array | Sequence[float],
    group_R: np.ndarray | jax.Array | Sequence[int] | Sequence[str],
    *,
    eps: float = 1e-6,
    norm_by_std: bool = True,
) -> np.ndarray:
    """(reward - mean) / (std + eps) within each group, with the unbiased std (DeepSeekMath, section 4.1.2).

    norm_by_std False: reward - mean (Dr. GRPO: Liu et al. 2025, arXiv 2503.20783, section 3.2).
    reward_R: one number per trajectory. group_R: the group of each trajectory, any integer or string; members of a
    group need not be adjacent. A group of one, or with equal rewards, gets exactly 0.
    Returns advantage_R float32. Runs on the host. Raises ValueError on unequal lengths and non-finite rewards.
    """
    # In float32 the mean of equal rewards may be off by a rounding error, which eps magnifies.
    reward_R = np.asarray(reward_R, np.float64)
    group_R = np.asarray(group_R)
    if reward_R.ndim != 1 or reward_R.shape != group_R.shape:
        raise ValueError(f"each trajectory needs one reward and one group: shapes {reward_R.shape}, {group_R.shape}")
    if not np.isfinite(reward_R).all():
        raise ValueError(f"the reward of trajectory {np.flatnonzero(~np.isfinite(reward_R))[0]} is not finite")

    _, first_G, index_R = np.unique(group_R, return_index=True, return_inverse=True)
    size_G = np.bincount(index_R)
    mean_G = np.bincount(index_R, reward_R) / size_G
    deviation_R = reward_R - mean_G[index_R]
    scale_R = np.ones_like(deviation_R)
    if norm_by_std:
        variance_G = np.bincount(index_R, deviation_R**2) / np.maximum(size_G - 1, 1)
        scale_R = np.sqrt(variance_G)[index_R] + eps

    has_spread_G = np.bincount(index_R, reward_R != reward_R[first_G][index_R]) > 0
    return np.where(has_spread_G[index_R], deviation_R / scale_R, 0).astype(np.float32)


def surrogate(
    config: TrainingConfig,
    logprob_BT: jax.Array,
    old_logprob_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """PPO's clipped loss (Schulman et al. 2017, equation 7) with the dual clip (Ye et al. 2020, equation 5).

    Returns loss_BT, 0 where masked, and metrics: means over the trained tokens for every aggregate. `approx_kl` is the
    mean old - new log-probability, bounded by MAX_LOG_RATIO per token as in the reference implementation.

    With r = exp(logprob - old_logprob) and the advantage A, a token's loss is
    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), bounded by -A dual_clip where A < 0.
    """
    log_ratio_BT = _bounded(jnp.where(mask_BT != 0, logprob_BT - old_logprob_BT, 0))
    advantage_BT = jnp.where(mask_BT != 0, advantage_BT, 0)
    ratio_BT = jnp.exp(log_ratio_BT)

    unclipped_BT = -advantage_BT * ratio_BT
    clipped_BT = -advantage_BT * jnp.clip(ratio_BT, 1 - config.clip_low, 1 + config.clip_high)
    ppo_loss_BT = jnp.maximum(unclipped_BT, clipped_BT)
    dual_bound_BT = -advantage_BT * config.dual_clip
    loss_BT = jnp.where(advantage_BT < 0, jnp.minimum(ppo_loss_BT, dual_bound_BT), ppo_loss_BT)
    return loss_BT, {
        "clip_fraction": masked.mean(clipped_BT > unclipped_BT, mask_BT),
        "dual_clip_fraction": masked.mean((advantage_BT < 0) & (ppo_loss_BT > dual_bound_BT), mask_BT),
        "approx_kl": masked.mean(-log_ratio_BT, mask_BT),
        "ratio_mean": masked.mean(ratio_BT, mask_BT),
        "ratio_max": jnp.max(ratio_BT, initial=0, where=mask_BT != 0),
    }


def policy_ratio(log_ratio_BT: jax.Array) -> jax.Array:
    """ratio_BT of two policies, from their log-ratio."""
    return jnp.exp(_bounded(log_ratio_BT))


def _bounded(log_ratio_BT: jax.Array) -> jax.Array:
    return jnp.clip(log_ratio_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def policy_loss(
    logprob_BT: jax.Array,
    old_logprob_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    aggregate: Aggregate,
    norm_tokens: int | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The clipped policy loss over a batch of one sequence per row, and its metrics.

    logprob_BT, old_logprob_BT, advantage_BT: float [B, T]; only entries where mask_BT is set matter.
    aggregate, norm_tokens: see `masked.token_weights`. The other settings: see `surrogate`.
    Returns the scalar loss and the metrics of `surrogate`. Raises ValueError for an unknown aggregate.
    """
    segment_BT = jnp.ones(mask_BT.shape, jnp.int32)
    weight_BT = masked.token_weights(mask_BT, aggregate, segment_BT, norm_tokens=norm_tokens)
    config = TrainingConfig(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    loss_BT, metrics = surrogate(config, logprob_BT, old_logprob_BT, advantage_BT, mask_BT)
    return masked.weighted_sum(loss_BT, weight_BT), metrics


def kl_k3(logprob_BT: jax.Array, ref_logprob_BT: jax.Array) -> jax.Array:
    """KL divergence from the reference policy per token: e^d - d - 1 with d = ref_logprob - logprob, at most MAX_K3.

    The non-negative, low-variance estimator k3 of Schulman, "Approximating KL Divergence" (2020). Its gradient is 0
    beyond the bound, as in the reference implementation.
    """
    # Clipping d to +-20 changes nothing: k3 exceeds MAX_K3 at both ends.
    log_ratio_BT = _bounded(ref_logprob_BT - logprob_BT)
    return jnp.minimum(jnp.exp(log_ratio_BT) - log_ratio_BT - 1, MAX_K3)
