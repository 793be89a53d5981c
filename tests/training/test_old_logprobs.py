"""The old log-probabilities of the ratio, and the weights of truncated importance sampling."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memsearcher_jax.training import losses, masked
from memsearcher_jax.training.config import TrainingConfig
from memsearcher_jax.training.logprobs import TokenScores
from memsearcher_jax.training.old_logprobs import LAST_TURN, mismatch_metrics, recompute_old_logprobs
from memsearcher_jax.training.packing import TrainingExample, merge_equal, plan_rows

SAMPLER, TRAINER = [-1.0, -2.0, -3.0, -0.5], [-1.1, -1.6, -3.0, -2.5]  # of the row's four trained tokens
WEIGHT = np.minimum(np.exp(np.subtract(TRAINER, SAMPLER)), 1.1)  # of which one is cut


@pytest.fixture(scope="module")
def rows():
    """One row with two contexts, of two trained tokens each."""
    first = TrainingExample((5, 6, 3, 2), (0.0, SAMPLER[0], 0.0, SAMPLER[1]), (False, True, False, True), -2.0)
    second = TrainingExample((7, 8, 9), (0.0, *SAMPLER[2:]), (False, True, True), 1.0)
    return plan_rows([first, second], 8, 1, np.random.default_rng(0))


def trainer_logprobs(row):
    logprob_BT = np.full(row.mask_BT.shape, np.nan, np.float32)
    logprob_BT[row.mask_BT] = TRAINER
    return jnp.asarray(logprob_BT)


def recompute(row, **changes):
    """The settings, and the row by a trainer whose log-probabilities of the trained tokens are TRAINER."""
    config = replace(TrainingConfig(kl_coefficient=0.0, entropy_coefficient=0.0, old_logprobs="trainer"), **changes)
    (recomputed,) = recompute_old_logprobs(config, lambda params, row: trainer_logprobs(row), {}, [row])
    return config, recomputed


def test_trainer_logprobs_replace_those_of_the_sampler(rows):
    row = rows.batch()
    _, resolved = recompute(row)
    metrics = mismatch_metrics(rows, trainer_logprobs(row))
    np.testing.assert_allclose(resolved.old_logprob_BT[row.mask_BT], TRAINER, rtol=1e-6)
    assert resolved.tis_weight_BT is None
    np.testing.assert_allclose(metrics["logprob_diff_mean"], (0.1 + 0.4 + 0 + 2) / 4, rtol=1e-5)
    np.testing.assert_allclose(metrics["logprob_diff_max"], 2, rtol=1e-5)


def test_tis_weights_scale_the_loss_and_gradient_of_each_token(rows):
    """They are trainer over sampler, truncated.

    On the policy that was sampled the ratio is 1: the gradient is -weight x advantage over the tokens.
    """
    row = rows.batch()
    config, resolved = recompute(row, tis_cap=1.1)
    np.testing.assert_allclose(resolved.tis_weight_BT[row.mask_BT], WEIGHT, rtol=1e-5)
    weight_BT = masked.token_weights(row.mask_BT, "token-mean", row.segment_BT)
    nothing_BT = jnp.zeros(row.mask_BT.shape)

    def loss(logprob_BT):
        return losses.grpo_loss(config, TokenScores(logprob_BT, nothing_BT, nothing_BT), resolved, weight_BT)

    (value, metrics), gradient_BT = jax.value_and_grad(loss, has_aux=True)(resolved.old_logprob_BT)
    advantage = np.array([-2, -2, 1, 1])
    np.testing.assert_allclose(value, -(WEIGHT * advantage).mean(), rtol=1e-5)
    np.testing.assert_allclose(gradient_BT[row.mask_BT], -WEIGHT * advantage / 4, rtol=1e-5)
    assert np.count_nonzero(gradient_BT) == 4
    np.testing.assert_allclose(metrics["tis_weight_mean"], WEIGHT.mean(), rtol=1e-5)
    assert metrics["tis_capped_fraction"] == 0.25


def test_the_mismatch_is_reported_by_turn():
    """Contexts of two, one and one tokens; both late turns are one."""
    diffs = {0: (0.1, 0.3), 3: (0.4,), LAST_TURN + 5: (1.0,), LAST_TURN - 1: (2.0,)}
    examples = [
        TrainingExample((1, *(2 for _ in diff)), (0.0, *diff), (False, *(True for _ in diff)), 0.0, number)
        for number, diff in diffs.items()
    ]
    rows = plan_rows(examples, 16, 1, np.random.default_rng(0))
    metrics = mismatch_metrics(rows, jnp.where(rows.batch().mask_BT, 0.0, jnp.nan))
    turns = {name: value for name, value in metrics.items() if "turn" in name}
    expected = {"turn_1": 0.2, "turn_4": 0.4, f"turn_{LAST_TURN}": 1.5}
    assert turns == {f"logprob_diff_mean/{turn}": pytest.approx(value) for turn, value in expected.items()}
    assert (metrics["logprob_diff_mean"], metrics["logprob_diff_max"]) == (pytest.approx(0.76), 2.0)


def test_the_mismatch_counts_equal_examples_as_often_as_they_are():
    """Nine equal contexts are off by 0.1 nats and one by 4.1, so the mean is 0.5 and not that of two contexts."""
    examples = [TrainingExample((1, 2), (0.0, 0.1), (False, True), 1.0)] * 9
    examples.append(TrainingExample((1, 3), (0.0, 4.1), (False, True), 1.0))
    rows = plan_rows(merge_equal(examples), 8, 1, np.random.default_rng(0))
    metrics = mismatch_metrics(rows, jnp.where(rows.batch().mask_BT, 0.0, jnp.nan))
    assert metrics["logprob_diff_mean"] == metrics["logprob_diff_mean/turn_1"] == pytest.approx(0.5)
    assert metrics["logprob_diff_max"] == pytest.approx(4.1)
