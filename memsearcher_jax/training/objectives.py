"""What an update minimises: from the log-probabilities of a batch to a loss and the numbers to report.

Both objectives are sums over tokens whose weights are fixed beforehand (`masked.token_weights`), so that the loss of a
batch is the sum over its micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from memsearcher_jax.training import grpo, masked
from memsearcher_jax.training.config import TrainingConfig
from memsearcher_jax.training.rows import Rows

Metrics = dict[str, jax.Array]
Objective = Callable[[TrainingConfig, jax.Array, jax.Array, Rows, jax.Array], tuple[jax.Array, Metrics]]
"""(config, logprob_BT, entropy_BT, rows, weight_BT) -> (these rows' share of the loss, metrics of these rows)."""


def multi_context_grpo(
    config: TrainingConfig, logprob_BT: jax.Array, entropy_BT: jax.Array, rows: Rows, weight_BT: jax.Array
) -> tuple[jax.Array, Metrics]:
    """policy + kl_coefficient k3 - entropy_coefficient entropy.

    Raises ValueError for rows without ref_logprob_BT or importance_BT where a coefficient or a cap asks for it.
    """
    tokens = grpo.surrogate(
        logprob_BT,
        rows.old_logprob_BT,
        rows.advantage_BT,
        rows.mask_BT,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        clip_c=config.clip_c,
        ratio=config.ratio,
        segment_BT=rows.segment_BT,
    )
    loss_BT, metrics = tokens.loss_BT, {}
    if config.importance_cap:
        if rows.importance_BT is None:
            raise ValueError("training.importance_cap is above 0, but the batch has no importance_BT")
        loss_BT *= rows.importance_BT
        metrics["importance_mean"] = masked.mean(rows.importance_BT, rows.mask_BT)
        metrics["importance_capped"] = masked.mean(rows.importance_BT >= config.importance_cap, rows.mask_BT)
    policy_loss, entropy = masked.total(loss_BT, weight_BT), masked.total(entropy_BT, weight_BT)
    loss = policy_loss - config.entropy_coefficient * entropy
    metrics |= {"policy_loss": policy_loss, "entropy": entropy}
    if config.kl_coefficient:
        if rows.ref_logprob_BT is None:
            raise ValueError("training.kl_coefficient is above 0, but the batch has no ref_logprob_BT")
        metrics["kl"] = masked.total(grpo.kl_k3(logprob_BT, rows.ref_logprob_BT), weight_BT)
        loss += config.kl_coefficient * metrics["kl"]
    difference_BT = jnp.abs(tokens.log_ratio_BT)
    return loss, metrics | tokens.statistics(rows.mask_BT) | {
        "loss": loss,
        "logprob_difference": masked.mean(difference_BT, rows.mask_BT),
        "logprob_difference_max": masked.largest(difference_BT, rows.mask_BT),
        "advantage_mean": masked.mean(rows.advantage_BT, rows.mask_BT),
        "advantage_std": masked.std(rows.advantage_BT, rows.mask_BT),
        "trained_tokens": jnp.sum(rows.mask_BT != 0),
    }


def supervised(
    config: TrainingConfig, logprob_BT: jax.Array, entropy_BT: jax.Array, rows: Rows, weight_BT: jax.Array
) -> tuple[jax.Array, Metrics]:
    """Cross entropy of the trained tokens. `likely` is the share of them that the model gives at least even odds."""
    loss = masked.total(-logprob_BT, weight_BT)
    return loss, {
        "loss": loss,
        "entropy": masked.total(entropy_BT, weight_BT),
        "likely": masked.mean((logprob_BT > jnp.log(0.5)).astype(jnp.float32), rows.mask_BT),
        "trained_tokens": jnp.sum(rows.mask_BT != 0),
    }
