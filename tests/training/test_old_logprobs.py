"""The old log-probabilities of the ratio, and the weights of truncated importance sampling."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memsearcher_jax.training import losses, masked
from memsearcher_jax.training.config import TrainingConfig
from memsearcher_jax.training.packing import TrainingExample, pack
from memsearcher_jax.training.trainer import LAST_TURN, mismatch_metrics, resolve_old_logprobs

SAMPLER, TRAINER = [-1.0, -2.0, -3.0, -0.5], [-1.1, -1.6, -3.0, -2.5]  # of four trained tokens, two in each context
WEIGHT = np.exp(np.subtract(TRAINER, SAMPLER))


def batches(count=2):
    """Mini-batches of one row with two contexts."""
    first = TrainingExample((7, 8, 9), (0.0, *SAMPLER[:2]), (False, True, True), 1.0)
    second = TrainingExample((5, 6, 3, 2), (0.0, SAMPLER[2], 0.0, SAMPLER[3]), (False, True, False, True), -2.0)
    row = pack([second, first], 8, 1, np.random.default_rng(0))
    assert row.segment_BT.tolist() == [[1, 1, 1, 1, 2, 2, 2, 0]]
    return [row] * count


ORDER = [2, 3, 0, 1]  # the row's trained tokens, as numbered above


def trained(x_BT, rows):
    """Values of the row's trained tokens, in the order of SAMPLER."""
    return np.asarray(x_BT)[np.asarray(rows.mask_BT)][np.argsort(ORDER)]


class Trainer:
    """A fake logprob_fn that gives every row `logprobs` and counts its calls."""

    def __init__(self, logprobs):
        self.logprobs, self.calls = np.array(logprobs)[ORDER], 0

    def __call__(self, params, rows):
        assert params == {"weights": "of the step"}
        self.calls += 1
        logprob_BT = np.full(rows.mask_BT.shape, np.nan, np.float32)
        logprob_BT[rows.mask_BT] = self.logprobs
        return jnp.asarray(logprob_BT)


def resolve(trainer, **changes):
    config = replace(TrainingConfig(), **changes)
    return resolve_old_logprobs(config, trainer, {"weights": "of the step"}, batches(), batches()[0])


def test_sampler_logprobs_need_no_forward_pass():
    trainer, given = Trainer(TRAINER), batches()
    taken, metrics = resolve_old_logprobs(TrainingConfig(), trainer, {}, given, given[0])
    assert (taken, metrics, trainer.calls) == (given, {}, 0)


def test_trainer_logprobs_replace_those_of_every_mini_batch():
    trainer = Trainer(TRAINER)
    taken, metrics = resolve(trainer, old_logprobs="trainer")
    assert trainer.calls == 2
    for rows in taken:
        np.testing.assert_allclose(trained(rows.old_logprob_BT, rows), TRAINER, rtol=1e-6)
        assert rows.tis_weight_BT is None
    np.testing.assert_allclose(metrics["logprob_diff_mean"], (0.1 + 0.4 + 0 + 2) / 4, rtol=1e-5)
    np.testing.assert_allclose(metrics["logprob_diff_max"], 2, rtol=1e-5)


def test_tis_weights_are_trainer_over_sampler_and_truncated():
    taken, _ = resolve(Trainer(TRAINER), old_logprobs="trainer", tis_cap=1.1)
    assert (WEIGHT > 1.1).any() and (WEIGHT < 1.1).any()
    for rows in taken:
        np.testing.assert_allclose(trained(rows.tis_weight_BT, rows), np.minimum(WEIGHT, 1.1), rtol=1e-5)


def test_tis_weights_scale_the_loss_and_gradient_of_each_token():
    """On the policy that was sampled the ratio is 1: the gradient is -weight x advantage over the tokens."""
    config = TrainingConfig(old_logprobs="trainer", tis_cap=1.1, kl_coefficient=0.0, entropy_coefficient=0.0)
    given = batches()
    (rows, *_), _ = resolve_old_logprobs(config, Trainer(TRAINER), {"weights": "of the step"}, given, given[0])
    weight_BT = masked.token_weights(rows.mask_BT, "token-mean", rows.segment_BT)
    nothing_BT = jnp.zeros(rows.mask_BT.shape)

    def loss(logprob_BT):
        return losses.grpo_loss(config, logprob_BT, nothing_BT, rows, weight_BT)

    (value, metrics), gradient_BT = jax.value_and_grad(loss, has_aux=True)(rows.old_logprob_BT)
    weight, advantage = np.minimum(WEIGHT, 1.1), np.array([1, 1, -2, -2])
    np.testing.assert_allclose(value, -(weight * advantage).mean(), rtol=1e-5)
    np.testing.assert_allclose(trained(gradient_BT, rows), -weight * advantage / 4, rtol=1e-5)
    assert np.count_nonzero(gradient_BT) == 4
    np.testing.assert_allclose(metrics["tis_weight_mean"], weight.mean(), rtol=1e-5)
    assert metrics["tis_capped_fraction"] == 0.25


def test_the_mismatch_is_reported_by_turn():
    """Contexts of two, one and one tokens; both late turns are one."""
    diffs = {0: (0.1, 0.3), 3: (0.4,), LAST_TURN + 5: (1.0,), LAST_TURN - 1: (2.0,)}
    examples = [
        TrainingExample(
            (1, *(2 for _ in diff)),
            (0.0, *diff),
            (False, *(True for _ in diff)),
            0.0,
            number,
        )
        for number, diff in diffs.items()
    ]
    batch = pack(examples, 16, 1, np.random.default_rng(0))
    metrics = mismatch_metrics(batch, jnp.where(batch.mask_BT, 0.0, jnp.nan))
    turns = {name: value for name, value in metrics.items() if "turn" in name}
    expected = {"turn_1": 0.2, "turn_4": 0.4, f"turn_{LAST_TURN}": 1.5}
    assert turns == {f"logprob_diff_mean/{turn}": pytest.approx(value) for turn, value in expected.items()}
    assert (metrics["logprob_diff_mean"], metrics["logprob_diff_max"]) == (pytest.approx(0.76), 2.0)
