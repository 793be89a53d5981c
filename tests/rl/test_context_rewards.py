"""A reward for each context: recorded rewards and advantages of Mem-alpha, and what a baseline per position removes."""

import json

import numpy as np
import pytest

from memsearcher_jax.agent.memalpha_reward import MemalphaRewardConfig, question_score, stream_reward
from memsearcher_jax.agent.types import Context, Outcome, Problem, Stop, Trajectory
from memsearcher_jax.rl.assemble import assemble, assemble_contexts
from memsearcher_jax.training import grpo

CONTEXT = Context((5, 6, 7), (0.0, -1.0, -2.0), (False, True, True))


def trajectory(contexts: int) -> Trajectory:
    return Trajectory(Problem("s", "?", ()), 0, Outcome(Stop.REMEMBERED), (CONTEXT,) * contexts, "")


def advantages(reward_RC, group_R, baseline, **settings):
    samples = assemble_contexts(
        [trajectory(len(r)) for r in reward_RC], reward_RC, group_R, baseline=baseline, **settings
    )
    return [sample.advantage for sample in samples]


def recorded(shared, name):
    with open(shared / "reference/memalpha" / name, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def rewards_of(asked, trajectory_):
    config = MemalphaRewardConfig(
        compression_weight=asked["beta"],
        content_weight=asked["gamma"],
        threshold=asked["threshold"] or 0.0,
        clip_compression=False,
    )
    scores = [question_score("squad", *pair) for pair in zip(trajectory_["preds"], trajectory_["golds"], strict=True)]
    return stream_reward(
        scores,
        memory_tokens=trajectory_["mem"],
        stream_tokens=trajectory_["chunk"],
        calls_C=trajectory_["r2"],
        content_C=trajectory_["r4"] if asked["use_r4"] else None,
        config=config,
    ).value_C


def test_recorded_rewards_and_advantages(shared):
    """The group is all contexts of all rollouts of a problem. Their padding rows are one more trajectory here."""
    compared = 0
    for case in recorded(shared, "rewards_advantages.jsonl"):
        asked, expected = case["input"], case["output"]
        if not asked["norm_by_std"]:
            continue
        groups = [(rewards_of(asked, one), number) for number, group in enumerate(asked["groups"]) for one in group]
        flat = [(value, number) for values, number in groups for value in values]
        repeated = flat[: asked["duplicate_first_rows"]]
        np.testing.assert_allclose(
            [value for value, _ in flat + repeated], expected["row_reward"], rtol=1e-5, atol=1e-6, err_msg=case["id"]
        )
        ours = advantages(
            [*(values for values, _ in groups), *([value] for value, _ in repeated)],
            [*(number for _, number in groups), *(number for _, number in repeated)],
            "pooled",
        )
        theirs = [row[0] for row in expected["advantages"]]
        for number in range(len(asked["groups"])):
            rows = [row for row, (_, group) in enumerate(flat + repeated) if group == number]
            spread = np.std([expected["row_reward"][row] for row in rows], ddof=1) if len(rows) > 1 else 0.0
            if spread > 1e-4:
                np.testing.assert_allclose(
                    [ours[row] for row in rows], [theirs[row] for row in rows], rtol=1e-4, atol=1e-5, err_msg=case["id"]
                )
                compared += len(rows)
            else:
                # A group of one keeps its raw reward there, and equal rewards their rounding; neither says anything.
                assert [ours[row] for row in rows] == [0.0] * len(rows)
    assert compared > 100


def test_recorded_advantages_of_episodes(shared):
    """The rows of whole episodes, padding rows included; a response without a token has no advantage to compare."""
    compared = 0
    for case in recorded(shared, "episodes.jsonl"):
        rows = case["output"]["rows"]
        names = sorted({row["group"] for row in rows})
        ours = advantages([[row["row_reward"]] for row in rows], [names.index(row["group"]) for row in rows], "pooled")
        for name in names:
            group = [(row, own) for row, own in zip(rows, ours, strict=True) if row["group"] == name]
            if len(group) > 1 and np.std([row["row_reward"] for row, _ in group], ddof=1) > 1e-4:
                for row, own in group:
                    if row["response_len"]:
                        assert own == pytest.approx(row["advantage"], rel=1e-4, abs=1e-5), case["id"]
                        compared += 1
    assert compared > 50


def test_recorded_losses(shared):
    """Dual clip and k3 in all four aggregates. Their `norm` divides by the width and takes no mean over sequences."""
    for case in recorded(shared, "policy_loss.jsonl"):
        asked, expected = case["input"], case["output"]
        names = ("log_prob", "old_log_prob", "advantages", "mask")
        logprob_BT, old_BT, advantage_BT, mask_BT = (np.asarray(asked[name], np.float32) for name in names)
        rows, width = mask_BT.shape
        loss, statistics = grpo.policy_loss(
            logprob_BT,
            old_BT,
            advantage_BT,
            mask_BT,
            clip_low=asked["cliprange"],
            clip_high=asked["cliprange"],
            clip_c=asked["clip_ratio_c"],
            aggregate=asked["loss_agg_mode"],
            norm_tokens=width,
        )
        scale = rows if asked["loss_agg_mode"] == "seq-mean-token-sum-norm" else 1
        assert float(loss) * scale == pytest.approx(expected["pg_loss"], abs=1e-5), case["id"]
        assert float(statistics["clip_fraction"]) == pytest.approx(expected["clipfrac"], abs=1e-6)
        assert float(statistics["dual_clip_fraction"]) == pytest.approx(expected["clipfrac_lower"], abs=1e-6)
        # They bound the difference of log-probabilities by 20 before this mean too, we only before exp.
        bounded = np.clip(old_BT - logprob_BT, -20, 20)[mask_BT > 0].mean()
        assert bounded == pytest.approx(expected["ppo_kl"], abs=1e-5)
        if np.abs(old_BT - logprob_BT).max() < 20:
            assert float(statistics["approximate_kl"]) == pytest.approx(expected["ppo_kl"], abs=1e-5)
        kl_BT = np.asarray(grpo.kl_k3(logprob_BT, np.asarray(asked["ref_log_prob"], np.float32)))
        np.testing.assert_allclose(kl_BT, expected["kl"], rtol=1e-4, atol=1e-6)


def test_pooled_rewards_of_equal_rollouts_by_hand():
    """FACTS: two rollouts of two chunks with r2 = (1, 0) each give +-0.866, although nobody did better."""
    alike = [(1.0, 0.0), (1.0, 0.0)]
    assert advantages(alike, [0, 0], "pooled") == pytest.approx([0.866, -0.866] * 2, abs=1e-3)
    assert advantages(alike, [0, 0], "position") == [0.0] * 4


def test_groups_and_positions_are_normalised_apart():
    rewards = [(1.0, 5.0), (0.0, 7.0), (2.0, 2.0), (2.0, 3.0)]
    root = 2**-0.5
    expected = [root, -root, -root, root, 0, -root, 0, root]
    assert advantages(rewards, [0, 0, 1, 1], "position") == pytest.approx(expected, abs=1e-4)
    even = advantages(rewards, [0, 0, 1, 1], "position", even_groups=False)
    assert even == pytest.approx([value for value in expected if value], abs=1e-4)


def test_a_reward_that_was_never_given_enters_nothing():
    nan = float("nan")
    assert advantages([(1.0, nan), (0.0, nan), (nan, nan)], [0, 0, 0], "pooled") == pytest.approx(
        [0.707, -0.707], abs=1e-3
    )
    assert advantages([(nan,)], [0], "position") == []


def test_every_context_needs_a_reward():
    with pytest.raises(ValueError, match=r"1 rewards for the 2 contexts of problem 's'"):
        assemble_contexts([trajectory(2)], [(1.0,)], [0], baseline="pooled")


def test_equal_rewards_of_all_contexts_are_those_of_their_trajectories_where_lengths_agree():
    rewards = [1.0, 0.0, 0.25]
    whole = [sample.advantage for sample in assemble([trajectory(2)] * 3, rewards, [0] * 3)]
    assert advantages([(reward, reward) for reward in rewards], [0] * 3, "position") == pytest.approx(whole)


def noise_and_signal(baseline: str, seed: int = 0) -> tuple[float, float]:
    """Of many groups in which a rollout's skill shifts all its rewards, and a chunk's place shifts them more:

    the share of the advantages' variance that the place explains, and the correlation of advantage and skill.
    """
    rng = np.random.default_rng(seed)
    problems, rollouts, chunks = 64, 8, 10
    skill_PG = rng.normal(0, 0.2, (problems, rollouts))
    # r2 falls along the stream, as more and more of what a chunk says is in the memory already.
    place_C = np.linspace(1.0, 0.2, chunks)
    reward_PGC = skill_PG[..., None] + place_C + rng.normal(0, 0.1, (problems, rollouts, chunks))
    group_R = np.repeat(np.arange(problems), rollouts)
    found = advantages(reward_PGC.reshape(-1, chunks).tolist(), group_R.tolist(), baseline)
    advantage_PGC = np.reshape(found, reward_PGC.shape)
    explained = advantage_PGC.mean((0, 1)).var() / advantage_PGC.var()
    return explained, np.corrcoef(advantage_PGC.ravel(), np.repeat(skill_PG.ravel(), chunks))[0, 1]


def test_a_baseline_per_position_removes_the_position_effect():
    """Measured (run with -s): the place of a chunk explains 60 % of the pooled advantages' variance and nothing of
    those per position; the correlation of a context's advantage with its rollout's skill rises from 0.52 to 0.81."""
    place, skill = noise_and_signal("pooled")
    apart_place, apart_skill = noise_and_signal("position")
    print(
        f"pooled: place {place:.2f}, skill {skill:.2f}; per position: place {apart_place:.2f}, skill {apart_skill:.2f}"
    )
    assert place > 0.5 and apart_place < 1e-6
    assert apart_skill > skill + 0.2
