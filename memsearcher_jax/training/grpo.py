"""Group-relative advantages and the clipped policy loss, as pure functions of arrays.

GRPO: Shao et al. 2024, "DeepSeekMath", section 4.1. Multi-context GRPO (MemSearcher) gives every context of a
trajectory the trajectory's advantage; that copy is made where contexts are known, not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from memsearcher_jax.training import masked
from memsearcher_jax.training.config import Aggregate, Ratio

# Bound on differences of log-probabilities before exp. At 20 the ratio is far outside every clip range, so neither
# the loss nor its gradient changes; without it exp overflows, and the gradient of a clipped inf is NaN.
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0  # the reference clamps the divergence of one token here


def group_advantages(
    reward_R: np.ndarray | jax.Array | Sequence[float],
    group_R: np.ndarray | jax.Array | Sequence[int] | Sequence[str],
    *,
    eps: float = 1e-6,
) -> np.ndarray:
    """(reward - mean) / (std + eps) within each group, with the unbiased std (DeepSeekMath, section 4.1.2).

    reward_R: one number per trajectory. group_R: the trajectory's group, by any integer or string; members need not
    be adjacent. A group of one, or whose rewards are all equal, gets exactly 0: it says nothing about what was better.
    Returns advantage_R float32. Runs on the host. Raises ValueError on unequal lengths and rewards that are not finite.
    """
    # float64, or the mean of equal rewards can be off by a rounding that eps then magnifies.
    reward_R = np.asarray(reward_R, np.float64)
    group_R = np.asarray(group_R)
    if reward_R.ndim != 1 or reward_R.shape != group_R.shape:
        raise ValueError(f"one reward and one group per trajectory, not {reward_R.shape} and {group_R.shape}")
    if not np.isfinite(reward_R).all():
        raise ValueError(f"the reward of trajectory {np.flatnonzero(~np.isfinite(reward_R))[0]} is not finite")

    names_G, index_R = np.unique(group_R, return_inverse=True)
    size_G = np.bincount(index_R, minlength=len(names_G))
    mean_G = np.bincount(index_R, reward_R, minlength=len(names_G)) / size_G
    deviation_R = reward_R - mean_G[index_R]
    variance_G = np.bincount(index_R, deviation_R**2, minlength=len(names_G)) / np.maximum(size_G - 1, 1)

    low_G, high_G = np.full(len(names_G), np.inf), np.full(len(names_G), -np.inf)
    np.minimum.at(low_G, index_R, reward_R)
    np.maximum.at(high_G, index_R, reward_R)
    has_spread_R = (low_G < high_G)[index_R]
    return np.where(has_spread_R, deviation_R / (np.sqrt(variance_G)[index_R] + eps), 0).astype(np.float32)


class Surrogate(NamedTuple):
    """The clipped objective token by token; all [B, T], 0 or False where the mask is not set."""

    loss_BT: jax.Array
    ratio_BT: jax.Array  # policy over behaviour policy, of the token or of its sequence; 1 where the mask is not set
    log_ratio_BT: jax.Array  # of the token; not bounded
    clipped_BT: jax.Array  # bool: the clip range decided the loss
    dual_clipped_BT: jax.Array  # bool: clip_c decided the loss

    def statistics(self, mask_BT: jax.Array) -> dict[str, jax.Array]:
        """Token means, whatever the aggregate; `approximate_kl` is the mean of old - new log-probabilities."""
        return {
            "clip_fraction": masked.mean(self.clipped_BT, mask_BT),
            "dual_clip_fraction": masked.mean(self.dual_clipped_BT, mask_BT),
            "approximate_kl": masked.mean(-self.log_ratio_BT, mask_BT),
            "ratio_mean": masked.mean(self.ratio_BT, mask_BT),
            "ratio_max": masked.largest(self.ratio_BT, mask_BT),
        }


def surrogate(
    logprob_BT: jax.Array,
    old_logprob_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
    ratio: Ratio = "token",
    segment_BT: jax.Array | None = None,
) -> Surrogate:
    """PPO's clipped loss (Schulman et al. 2017, equation 7) with the dual clip (Ye et al. 2020, equation 5).

    With r = exp(logprob - old_logprob) and the advantage A, a token's loss is
    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and where A < 0 at most -A clip_c.

    `ratio` "sequence": r is the length-normalised ratio of the token's whole sequence (see `policy_ratio`), through
    which every token of it has a share in the gradient. The advantage is the same all along a sequence then.
    """
    mask_BT = mask_BT != 0
    log_ratio_BT = jnp.where(mask_BT, logprob_BT - old_logprob_BT, 0)
    advantage_BT = jnp.where(mask_BT, advantage_BT, 0)
    ratio_BT = policy_ratio(log_ratio_BT, mask_BT, ratio, segment_BT)

    free_BT = -advantage_BT * ratio_BT
    bounded_BT = -advantage_BT * jnp.clip(ratio_BT, 1 - clip_low, 1 + clip_high)
    clipped_BT = jnp.maximum(free_BT, bounded_BT)
    ceiling_BT = -advantage_BT * clip_c
    loss_BT = jnp.where(advantage_BT < 0, jnp.minimum(clipped_BT, ceiling_BT), clipped_BT)
    return Surrogate(
        loss_BT=loss_BT,
        ratio_BT=ratio_BT,
        log_ratio_BT=log_ratio_BT,
        clipped_BT=bounded_BT > free_BT,
        dual_clipped_BT=(advantage_BT < 0) & (clipped_BT > ceiling_BT),
    )


def policy_ratio(
    log_ratio_BT: jax.Array, mask_BT: jax.Array, ratio: Ratio, segment_BT: jax.Array | None = None
) -> jax.Array:
    """ratio_BT of two policies, from the difference of their log-probabilities; 1 where the mask is not set.

    "token": exp of each difference. "sequence": exp of their mean over the mask within each sequence, that is the
    ratio of the sequence's probabilities to the power of 1 / length (GSPO: Zheng et al. 2025, arXiv 2507.18071,
    section 4.1). segment_BT as in `masked.token_weights`.
    """
    if ratio == "sequence":
        log_ratio_BT = masked.segment_means(log_ratio_BT, mask_BT, segment_BT)
    return jnp.exp(jnp.where(mask_BT != 0, jnp.clip(log_ratio_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO), 0))


def policy_loss(
    logprob_BT: jax.Array,
    old_logprob_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
    aggregate: Aggregate,
    ratio: Ratio = "token",
    norm_tokens: int | None = None,
    segment_BT: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The clipped policy loss over a batch, and statistics that describe it.

    logprob_BT, old_logprob_BT, advantage_BT: float [B, T]; only entries where mask_BT is set matter.
    segment_BT tells the sequences of a packed row apart (see `masked.token_weights`); without it a row is a sequence.
    `norm_tokens`: the constant of the aggregate that has one. `ratio`: see `surrogate`.
    Returns the scalar loss and the `Surrogate.statistics`. Raises ValueError for an unknown aggregate.
    """
    weight_BT = masked.token_weights(mask_BT, aggregate, segment_BT, norm_tokens=norm_tokens)
    tokens = surrogate(
        logprob_BT,
        old_logprob_BT,
        advantage_BT,
        mask_BT,
        clip_low=clip_low,
        clip_high=clip_high,
        clip_c=clip_c,
        ratio=ratio,
        segment_BT=segment_BT,
    )
    return masked.total(tokens.loss_BT, weight_BT), tokens.statistics(mask_BT)


def kl_k3(logprob_BT: jax.Array, ref_logprob_BT: jax.Array) -> jax.Array:
    """Divergence from the reference policy, token by token: e^d - d - 1 with d = ref_logprob - logprob, at most 10.

    The low-variance, never negative estimator k3 of Schulman, "Approximating KL Divergence" (2020). Past the bound
    its gradient is 0, as in the reference.
    """
    # -20 and 20 already lie past the bound on both sides: e^20 and 19 are above 10.
    difference_BT = jnp.clip(ref_logprob_BT - logprob_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.minimum(jnp.exp(difference_BT) - difference_BT - 1, MAX_K3)
