"""Loss functions: from the log-probabilities of a batch to a loss and metrics.

Every loss is a sum over tokens with weights that are fixed beforehand (`masked.token_weights`), so that the loss of a
batch is the sum of the losses of its micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy

from memsearcher_jax.training import distillation, grpo, masked
from memsearcher_jax.training.config import TrainingConfig
from memsearcher_jax.training.logprobs import TokenScores
from memsearcher_jax.training.packing import PackedBatch

Metrics = dict[str, jax.Array]
LossFn = Callable[[TrainingConfig, TokenScores, PackedBatch, jax.Array], tuple[jax.Array, Metrics]]
"""(config, scores, batch, weight_BT) -> (loss, metrics)."""


def grpo_loss(
    config: TrainingConfig, scores: TokenScores, batch: PackedBatch, weight_BT: jax.Array
) -> tuple[jax.Array, Metrics]:
    """policy loss + kl_coefficient * k3 divergence - entropy_coefficient * entropy.

    All are averaged by `config.aggregate`. With the teacher's most likely tokens, the forward divergence from the
    teacher over these is added.

    The metrics `kl` and `entropy` are means over the trained tokens in nats, whatever the aggregate.
    """
    loss_BT, metrics = grpo.surrogate(
        config, scores.logprob_BT, batch.old_logprob_BT, batch.advantage_BT, batch.count_BT
    )
    if config.tis_cap:
        assert batch.tis_weight_BT is not None, "old_logprobs is trainer"
        loss_BT *= batch.tis_weight_BT
        metrics["tis_weight_mean"] = masked.mean(batch.tis_weight_BT, batch.count_BT)
        metrics["tis_capped_fraction"] = masked.mean(batch.tis_weight_BT >= config.tis_cap, batch.count_BT)
    policy_loss = masked.weighted_sum(loss_BT, weight_BT)
    loss = policy_loss - config.entropy_coefficient * masked.weighted_sum(scores.entropy_BT, weight_BT)
    if config.kl_coefficient:
        assert batch.ref_logprob_BT is not None, "a KL term needs the reference"
        kl_BT = grpo.kl_k3(scores.logprob_BT, batch.ref_logprob_BT)
        loss += config.kl_coefficient * masked.weighted_sum(kl_BT, weight_BT)
        metrics["kl"] = _token_mean(kl_BT, batch)
    if batch.teacher_ids_BTK is not None:
        assert batch.teacher_weight_BT is not None and batch.teacher_probability_BTK is not None, "set together"
        p_BTK = batch.teacher_probability_BTK
        divergence_BT = jnp.sum(xlogy(p_BTK, p_BTK), axis=-1) - scores.teacher_BT
        loss += masked.weighted_sum(batch.teacher_weight_BT * divergence_BT, weight_BT)
        metrics |= distillation.divergence_sums(divergence_BT, batch)
    return loss, metrics | {
        "loss": loss,
        "policy_loss": policy_loss,
        "entropy": _token_mean(scores.entropy_BT, batch),
        "trained_tokens": jnp.sum(batch.count_BT),
    }


def sft_loss(
    config: TrainingConfig, scores: TokenScores, batch: PackedBatch, weight_BT: jax.Array
) -> tuple[jax.Array, Metrics]:
    """Cross entropy of the trained tokens: up to a constant the forward KL divergence from whoever sampled them.

    The metric `forward_kl` estimates that divergence from the log-probabilities that were recorded; those of a program
    are 0.
    """
    loss = masked.weighted_sum(-scores.logprob_BT, weight_BT)
    return loss, {
        "loss": loss,
        "forward_kl": masked.mean(batch.old_logprob_BT - scores.logprob_BT, batch.count_BT),
        "entropy": _token_mean(scores.entropy_BT, batch),
        "trained_tokens": jnp.sum(batch.count_BT),
    }


def _token_mean(x_BT: jax.Array, batch: PackedBatch) -> jax.Array:
    # Not masked.mean: with the aggregate "token-mean" the metric is the loss's own term to the bit.
    return masked.weighted_sum(x_BT, masked.token_weights(batch.count_BT, "token-mean", batch.segment_BT))
