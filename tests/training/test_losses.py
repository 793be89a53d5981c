"""Supervision, and what metrics mean; multi-context GRPO is tested in test_grpo and test_update."""

from dataclasses import replace

import numpy as np
import pytest

from memsearcher_jax.training import grpo, losses
from memsearcher_jax.training.config import Aggregate
from memsearcher_jax.training.logprobs import TokenScores
from memsearcher_jax.training.masked import token_weights
from memsearcher_jax.training.packing import merge_equal, pack


def test_the_supervised_loss_is_the_mean_cross_entropy_of_the_trained_tokens(nano):
    rows = nano.batch
    rng = np.random.default_rng(0)
    logprob_BT = np.log(rng.uniform(0.05, 1, rows.mask_BT.shape)).astype(np.float32)
    entropy_BT = rng.uniform(0, 1, rows.mask_BT.shape).astype(np.float32)
    weight_BT = token_weights(rows.mask_BT, "token-mean", rows.segment_BT)
    loss, metrics = losses.sft_loss(nano.training, TokenScores(logprob_BT, entropy_BT, 0 * logprob_BT), rows, weight_BT)
    trained = logprob_BT[rows.mask_BT]
    np.testing.assert_allclose(loss, -trained.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["forward_kl"], (rows.old_logprob_BT[rows.mask_BT] - trained).mean(), rtol=1e-5)
    assert metrics["trained_tokens"] == rows.mask_BT.sum()


@pytest.mark.parametrize("aggregate", Aggregate.__args__)
@pytest.mark.parametrize("loss_fn", [losses.grpo_loss, losses.sft_loss])
def test_entropy_and_kl_are_means_over_tokens_whatever_the_loss_averages(nano, aggregate, loss_fn):
    """Alarms compare them with limits in nats per token."""
    rows, rng = nano.batch, np.random.default_rng(0)
    logprob_BT = np.log(rng.uniform(0.05, 1, rows.mask_BT.shape)).astype(np.float32)
    entropy_BT = rng.uniform(0, 1, rows.mask_BT.shape).astype(np.float32)
    config = replace(nano.training, aggregate=aggregate)
    weight_BT = token_weights(rows.mask_BT, aggregate, rows.segment_BT, norm_tokens=config.norm_tokens)
    loss, metrics = loss_fn(config, TokenScores(logprob_BT, entropy_BT, 0 * logprob_BT), rows, weight_BT)
    np.testing.assert_allclose(metrics["entropy"], entropy_BT[rows.mask_BT].mean(), rtol=1e-5)
    if loss_fn is losses.grpo_loss:
        kl_BT = np.asarray(grpo.kl_k3(logprob_BT, rows.ref_logprob_BT))
        np.testing.assert_allclose(metrics["kl"], kl_BT[rows.mask_BT].mean(), rtol=1e-5)
        penalty_BT = config.kl_coefficient * kl_BT - config.entropy_coefficient * entropy_BT
        np.testing.assert_allclose(loss, metrics["policy_loss"] + np.sum(penalty_BT * weight_BT), rtol=1e-5)


@pytest.mark.parametrize("aggregate", Aggregate.__args__)
def test_equal_examples_are_computed_once_and_count_as_often_as_they_are(nano, aggregate):
    config, rng = replace(nano.training, aggregate=aggregate), np.random.default_rng(0)
    examples = [nano.examples[index] for index in rng.integers(0, len(nano.examples), 3 * len(nano.examples))]
    merged = merge_equal(examples)
    assert len(merged) < len(examples) == sum(one.count for one in merged)

    def loss(examples):
        rows = nano.with_reference(pack(examples, config.seq_len, 64, rng))
        x_BT = np.where(rows.mask_BT, (7 * rows.ids_BT + rows.position_BT) % 11 / 10, np.nan).astype(np.float32)
        weight_BT = token_weights(rows.count_BT, aggregate, rows.segment_BT, norm_tokens=config.norm_tokens)
        _, metrics = losses.grpo_loss(config, TokenScores(-x_BT, x_BT, 0 * x_BT), rows, weight_BT)
        return {name: float(value) for name, value in metrics.items()}

    assert loss(merged) == pytest.approx(loss(examples), rel=1e-5)
