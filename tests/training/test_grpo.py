"""Advantages and losses against the recorded reference, and what the formulas promise beyond it."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memsearcher_jax.training import grpo, masked

AGGREGATES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
# The reference's README: rounding of its float32 mean decides these; and a group of one, which FACTS.md lists as a bug.
ILL_CONDITIONED = {"all_equal_float_noise", "near_equal"}
UNUSED_BY_TRAINER = {"use_adv_false"}


def recorded(shared, name):
    lines = (shared / "reference" / "memsearcher" / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def number(value):
    return np.float64(value)  # also reads the strings "NaN" and "Infinity"


WIDTH = 64  # cases are padded to it with masked tokens, so that few shapes are compiled
FIELDS = ("log_prob", "old_log_prob", "ref_log_prob", "advantages", "response_mask")


def policy_case(case):
    """A recorded case with padded float32 arrays, and its true width."""
    arrays = {name: np.asarray(case[name], np.float32) for name in FIELDS}
    width = arrays["log_prob"].shape[1]
    return case | {name: np.pad(x, ((0, 0), (0, WIDTH - width))) for name, x in arrays.items()}, width


def test_advantages_agree_with_the_reference(shared):
    compared = 0
    for case in recorded(shared, "grpo_advantage.jsonl"):
        if case["category"] in ILL_CONDITIONED | UNUSED_BY_TRAINER:
            continue
        advantage_R = grpo.group_advantages(case["rewards"], case["uids"], eps=case["epsilon"])
        alone_R = np.array([case["uids"].count(uid) == 1 for uid in case["uids"]])
        expected_R = np.where(alone_R, 0, case["advantage_per_trajectory"])
        np.testing.assert_allclose(advantage_R, expected_R, atol=1e-5, err_msg=case["id"])
        compared += int((~alone_R).sum())
    assert compared > 100


def test_groups_without_spread_get_exactly_zero(shared):
    for case in recorded(shared, "grpo_advantage.jsonl"):
        if case["category"].startswith("all_equal"):
            assert not grpo.group_advantages(case["rewards"], case["uids"]).any()
    assert grpo.group_advantages([0.7], ["alone"]) == 0


@pytest.mark.parametrize(("reward_R", "group_R"), [([1.0, 2.0], [0]), ([1.0, float("nan")], [0, 0])])
def test_invalid_rewards_are_refused(reward_R, group_R):
    with pytest.raises(ValueError, match="trajectory"):
        grpo.group_advantages(reward_R, group_R)


@partial(jax.jit, static_argnames="aggregate")
@partial(jax.value_and_grad, has_aux=True)
def losses(logprob_BT, arrays, settings, aggregate):
    """total_loss of a recorded case, with its parts."""
    mask_BT = arrays["response_mask"]
    loss, statistics = grpo.policy_loss(
        logprob_BT,
        arrays["old_log_prob"],
        arrays["advantages"],
        mask_BT,
        clip_low=settings["cliprange_low"],
        clip_high=settings["cliprange_high"],
        dual_clip=settings["clip_ratio_c"],
        aggregate=aggregate,
    )
    kl_BT = grpo.kl_k3(logprob_BT, arrays["ref_log_prob"])
    kl = masked.weighted_sum(kl_BT, masked.token_weights(mask_BT, aggregate, jnp.ones(mask_BT.shape, jnp.int32)))
    return loss + settings["kl_coef"] * kl, {"pg_loss": loss, "low_var_kl_loss": kl, **statistics}


def run(case, aggregate):
    """((total, parts), gradient_BT) of a padded case."""
    settings = {name: case[name] for name in ("cliprange_low", "cliprange_high", "clip_ratio_c", "kl_coef")}
    return losses(case["log_prob"], {name: case[name] for name in FIELDS}, settings, aggregate)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_losses_and_gradients_agree_with_the_reference(shared, aggregate):
    names = {
        "pg_loss": "pg_loss",
        "low_var_kl_loss": "low_var_kl_loss",
        "pg_clipfrac": "clip_fraction",
        "pg_clipfrac_lower": "dual_clip_fraction",
        "ppo_kl": "approx_kl",
    }
    compared = 0
    for raw in recorded(shared, "policy_loss.jsonl"):
        expected = raw["policy"][aggregate]
        case, width = policy_case(raw)
        (total, parts), gradient_BT = run(case, aggregate)
        if np.isnan(number(expected["total_loss"])):
            # The reference divides 0 by 0 for a row without trained tokens. Ours leaves that row out.
            assert np.isfinite(np.asarray(total)) and np.isfinite(np.asarray(gradient_BT)).all()
            continue
        close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5, err_msg=case["id"])
        close(total, number(expected["total_loss"]))
        gradient_BT = np.asarray(gradient_BT)
        close(gradient_BT[:, :width], np.asarray(expected["grad_log_prob"], np.float64))
        assert not gradient_BT[:, width:].any()
        for theirs, ours in names.items():
            close(parts[ours], number(expected[theirs]))
        compared += 1
    assert compared > 20


def test_divergence_agrees_with_the_reference(shared):
    @jax.jit
    def divergence(logprob_BT, ref_logprob_BT, mask_BT):
        gradient_BT = jax.grad(lambda x_BT: masked.mean(grpo.kl_k3(x_BT, ref_logprob_BT), mask_BT))(logprob_BT)
        return grpo.kl_k3(logprob_BT, ref_logprob_BT), gradient_BT

    for raw in recorded(shared, "policy_loss.jsonl"):
        case, width = policy_case(raw)
        arrays = divergence(case["log_prob"], case["ref_log_prob"], case["response_mask"])
        kl_BT, gradient_BT = map(np.asarray, arrays)
        expected = raw["kl"]["low_var_kl"]
        close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5, err_msg=case["id"])
        close(kl_BT[:, :width], np.asarray(expected["per_token"]))
        close(gradient_BT[:, :width], np.asarray(expected["grad_log_prob_token_mean"], np.float64))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-500.0, 500.0])
def test_ratios_that_overflow_give_finite_gradients(advantage, log_ratio):
    def loss(logprob_BT):
        settings = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "aggregate": "token-mean"}
        old_BT, advantage_BT = jnp.zeros((1, 2)), jnp.full((1, 2), advantage)
        policy, _ = grpo.policy_loss(logprob_BT, old_BT, advantage_BT, jnp.ones((1, 2)), **settings)
        return policy + grpo.kl_k3(logprob_BT, old_BT).sum()

    value, gradient_BT = jax.jit(jax.value_and_grad(loss))(np.full((1, 2), log_ratio, np.float32))
    assert np.isfinite(value)
    np.testing.assert_allclose(gradient_BT, 0, atol=1e-6)


def test_the_approximate_divergence_is_bounded_per_token():
    """By the bound of the ratio, as in the reference implementation: one absurd token does not hide the others."""
    old_BT = np.array([[0.0, -1.0, -30.0, 0.0]], np.float32)
    logprob_BT = np.array([[-0.5, -1.0, 0.0, -300.0]], np.float32)
    settings = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "aggregate": "token-mean"}
    _, metrics = grpo.policy_loss(logprob_BT, old_BT, jnp.ones((1, 4)), jnp.ones((1, 4)), **settings)
    np.testing.assert_allclose(metrics["approx_kl"], (0.5 + 0 - 20 + 20) / 4, rtol=1e-6)
