"""Rewards per context: recorded rewards and advantages of Mem-alpha, and the effect of a baseline per position."""

import json

import jax
import numpy as np
import pytest

from memsearcher_jax.agent.memalpha.reward import MemalphaRewardConfig, question_score, stream_reward
from memsearcher_jax.rl.advantages import multi_context_advantages
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.training import grpo
from memsearcher_jax.types import Context, Outcome, Problem, ScoredTrajectory, StopReason, Trajectory

CONTEXT = Context((5, 6, 7), (0.0, -1.0, -2.0), (False, True, True))


def trajectory(contexts: int) -> Trajectory:
    return Trajectory(Problem("s", "?", ()), 0, Outcome(StopReason.STREAM_READ), (CONTEXT,) * contexts, "")


def advantages(reward_RC, group_R, scope, **settings):
    scored = [ScoredTrajectory(trajectory(len(r)), 0.0, context_rewards=tuple(r)) for r in reward_RC]
    examples = multi_context_advantages(scored, group_R, RLConfig(advantage_scope=scope, **settings))
    return [example.advantage for example in examples]


def recorded(shared, name):
    with open(shared / "reference/memalpha" / name, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def rewards_of(inputs, trajectory_):
    config = MemalphaRewardConfig(
        compression_weight=inputs["beta"],
        content_weight=inputs["gamma"],
        threshold=inputs["threshold"] or 0.0,
        clip_compression=False,
    )
    scores = [question_score("squad", *pair) for pair in zip(trajectory_["preds"], trajectory_["golds"], strict=True)]
    return stream_reward(
        scores,
        memory_tokens=trajectory_["mem"],
        stream_tokens=trajectory_["chunk"],
        calls_C=trajectory_["r2"],
        content_C=trajectory_["r4"] if inputs["use_r4"] else None,
        config=config,
    )[0]


def test_recorded_rewards_and_advantages(shared):
    """A group has all contexts of all rollouts of a problem. Each padding row of the reference is a trajectory here."""
    compared = 0
    for case in recorded(shared, "rewards_advantages.jsonl"):
        inputs, expected = case["input"], case["output"]
        if not inputs["norm_by_std"]:
            continue
        groups = [
            (rewards_of(inputs, rollout), number) for number, group in enumerate(inputs["groups"]) for rollout in group
        ]
        flat = [(value, number) for values, number in groups for value in values]
        repeated = flat[: inputs["duplicate_first_rows"]]
        np.testing.assert_allclose(
            [value for value, _ in flat + repeated], expected["row_reward"], rtol=1e-5, atol=1e-6, err_msg=case["id"]
        )
        ours = advantages(
            [*(values for values, _ in groups), *([value] for value, _ in repeated)],
            [*(number for _, number in groups), *(number for _, number in repeated)],
            "pooled",
        )
        theirs = [row[0] for row in expected["advantages"]]
        for number in range(len(inputs["groups"])):
            rows = [row for row, (_, group) in enumerate(flat + repeated) if group == number]
            spread = np.std([expected["row_reward"][row] for row in rows], ddof=1) if len(rows) > 1 else 0.0
            if spread > 1e-4:
                np.testing.assert_allclose(
                    [ours[row] for row in rows], [theirs[row] for row in rows], rtol=1e-4, atol=1e-5, err_msg=case["id"]
                )
                compared += len(rows)
            else:
                # In the reference, a group of one row keeps its raw reward and equal rewards leave rounding errors.
                assert [ours[row] for row in rows] == [0.0] * len(rows)
    assert compared > 100


def test_recorded_advantages_of_episodes(shared):
    """The rows of complete episodes with padding rows; a response without tokens has no advantage to compare."""
    compared = 0
    for case in recorded(shared, "episodes.jsonl"):
        rows = case["output"]["rows"]
        names = sorted({row["group"] for row in rows})
        advantage_R = advantages(
            [[row["row_reward"]] for row in rows], [names.index(row["group"]) for row in rows], "pooled"
        )
        for name in names:
            group = [(row, ours) for row, ours in zip(rows, advantage_R, strict=True) if row["group"] == name]
            if len(group) > 1 and np.std([row["row_reward"] for row, _ in group], ddof=1) > 1e-4:
                for row, ours in group:
                    if row["response_len"]:
                        assert ours == pytest.approx(row["advantage"], rel=1e-4, abs=1e-5), case["id"]
                        compared += 1
    assert compared > 50


def test_recorded_losses(shared):
    """Dual clip and k3 in all aggregates."""
    policy_loss = jax.jit(grpo.policy_loss, static_argnames=("aggregate", "norm_tokens"))
    for case in recorded(shared, "policy_loss.jsonl"):
        inputs, expected = case["input"], case["output"]
        names = ("log_prob", "old_log_prob", "advantages", "mask")
        logprob_BT, old_BT, advantage_BT, mask_BT = (np.asarray(inputs[name], np.float32) for name in names)
        loss, statistics = policy_loss(
            logprob_BT,
            old_BT,
            advantage_BT,
            mask_BT,
            clip_low=inputs["cliprange"],
            clip_high=inputs["cliprange"],
            dual_clip=inputs["clip_ratio_c"],
            aggregate=inputs["loss_agg_mode"],
            norm_tokens=mask_BT.shape[1],
        )
        assert float(loss) == pytest.approx(expected["pg_loss"], abs=1e-5), case["id"]
        assert float(statistics["clip_fraction"]) == pytest.approx(expected["clipfrac"], abs=1e-6)
        assert float(statistics["dual_clip_fraction"]) == pytest.approx(expected["clipfrac_lower"], abs=1e-6)
        assert float(statistics["approx_kl"]) == pytest.approx(expected["ppo_kl"], abs=1e-5), case["id"]
        kl_BT = np.asarray(jax.jit(grpo.kl_k3)(logprob_BT, np.asarray(inputs["ref_log_prob"], np.float32)))
        np.testing.assert_allclose(kl_BT, expected["kl"], rtol=1e-4, atol=1e-6)


def test_pooled_rewards_of_equal_rollouts_by_hand():
    """Two rollouts of two chunks with r2 = (1, 0) each give +-0.866, although neither rollout is better."""
    equal_rollouts = [(1.0, 0.0), (1.0, 0.0)]
    assert advantages(equal_rollouts, [0, 0], "pooled") == pytest.approx([0.866, -0.866] * 2, abs=1e-3)
    assert advantages(equal_rollouts, [0, 0], "position") == [0.0] * 4


def test_groups_and_positions_are_normalised_separately():
    rewards = [(1.0, 5.0), (0.0, 7.0), (2.0, 2.0), (2.0, 3.0)]
    root = 2**-0.5
    expected = [root, -root, -root, root, 0, -root, 0, root]
    assert advantages(rewards, [0, 0, 1, 1], "position") == pytest.approx(expected, abs=1e-4)
    mixed = advantages(rewards, [0, 0, 1, 1], "position", keep_constant_reward_groups=False)
    assert mixed == pytest.approx([value for value in expected if value], abs=1e-4)


def test_missing_rewards_are_ignored():
    nan = float("nan")
    assert advantages([(1.0, nan), (0.0, nan), (nan, nan)], [0, 0, 0], "pooled") == pytest.approx(
        [0.707, -0.707], abs=1e-3
    )
    assert advantages([(nan,)], [0], "position") == []
