from dataclasses import replace

import pytest

from memsearcher_jax.agent.base import Scoring
from memsearcher_jax.agent.config import AgentConfig
from memsearcher_jax.agent.memsearcher import MemSearcher
from memsearcher_jax.agent.reward import token_f1
from memsearcher_jax.logs.trajectories import summarize_trajectory
from memsearcher_jax.rl.advantages import mixed_groups, multi_context_advantages
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.rl.metrics import trajectory_metrics
from memsearcher_jax.types import Context, Outcome, Problem, ScoredTrajectory, StopReason, Trajectory


def trajectory(contexts: int, sampled: bool = True) -> Trajectory:
    context = Context((5, 6, 7), (0.0, -1.0, -2.0), (False, sampled, sampled))
    return Trajectory(Problem("q", "?", ("a",)), 0, Outcome(StopReason.ANSWERED), (context,) * contexts, "")


def examples(trajectories, reward_R, group_R, **settings):
    scored = [ScoredTrajectory(*pair) for pair in zip(trajectories, reward_R, strict=True)]
    return multi_context_advantages(scored, group_R, RLConfig(**settings))


def test_every_context_has_the_advantage_of_its_trajectory():
    result = examples([trajectory(3), trajectory(1)], [1.0, 0.0], [0, 0])
    assert [round(example.advantage, 3) for example in result] == [0.707] * 3 + [-0.707]


def test_long_trajectories_do_not_shift_the_mean_of_their_group():
    """Rewards are normalised over trajectories, before trajectories are split into contexts."""
    short = examples([trajectory(1), trajectory(1), trajectory(1)], [1.0, 0.0, 0.1], [0, 0, 0])
    long = examples([trajectory(5), trajectory(1), trajectory(2)], [1.0, 0.0, 0.1], [0, 0, 0])
    assert [long[0].advantage, long[5].advantage, long[6].advantage] == [example.advantage for example in short]


def test_advantages_without_the_standard_deviation():
    result = examples([trajectory(1)] * 4, [1.0, 0.0, 5.0, 5.0], [0, 0, 1, 1], norm_by_std=False)
    assert [example.advantage for example in result] == [0.5, -0.5, 0, 0]


def test_groups_with_constant_rewards_can_be_left_out():
    result = examples([trajectory(2)] * 4, [1.0, 0.0, 0.1, 0.1], [0, 0, 1, 1], keep_constant_reward_groups=False)
    assert [round(example.advantage, 3) for example in result] == [0.707] * 2 + [-0.707] * 2
    assert examples([trajectory(1)] * 2, [1.0, 1.0], [0, 0], keep_constant_reward_groups=False) == []


def test_the_last_context_alone_can_be_trained():
    """The ablation changes which contexts carry the advantages, not how they are normalised."""
    first, last = Context((5, 6), (0.0, -1.0), (False, True)), Context((7, 8), (0.0, -2.0), (False, True))
    long = Trajectory(Problem("q", "?", ("a",)), 0, Outcome(StopReason.ANSWERED), (first, last), "")
    result = examples([long, trajectory(1)], [1.0, 0.0], [0, 0], credit="last_context")
    assert [example.ids.tolist() for example in result] == [[7, 8], [5, 6, 7]]
    assert [round(example.advantage, 3) for example in result] == [0.707, -0.707]


def test_a_search_outage_teaches_nothing():
    """Two wrong guesses and three lost searches: the guesses gain nothing over searching."""
    lost = [replace(trajectory(2), outcome=Outcome(StopReason.SEARCH_FAILED, error="refused"))] * 3
    guesses = replace(trajectory(1), transcript="<|im_start|>assistant\n<think>t</think>\\boxed{b}<|im_end|>")
    agent = MemSearcher(AgentConfig())
    scored = agent.rewards((guesses, guesses, *lost), Scoring(None))
    assert [one.reward for one in scored[:2]] == [0.1, 0.1]
    result = multi_context_advantages(scored, [0] * 5, RLConfig())
    assert [example.advantage for example in result] == [0.0, 0.0]
    metrics = trajectory_metrics(list(map(summarize_trajectory, scored)), agent)
    assert (metrics["reward"], metrics["unscored"], metrics["stop/search_failed"]) == pytest.approx((0.1, 0.6, 0.6))


def test_examples_keep_ids_masks_and_logprobs_of_sampling():
    (example,) = examples([trajectory(1)], [1.0], [0])
    assert example.ids.tolist() == [5, 6, 7]
    assert example.sampled.tolist() == [False, True, True]
    assert example.logprobs.tolist() == pytest.approx([0.0, -1.0, -2.0])


def test_mixed_groups_have_different_known_rewards():
    nan = float("nan")
    mixed = mixed_groups([1.0, 0.0, 0.5, 0.5, nan, 1.0, nan, nan], [0, 0, 1, 1, 2, 2, 3, 3])
    assert mixed == [True, False, False, False]


def test_scores_that_differ_by_a_rounding_error_are_no_spread():
    """Else a refilled step would count such a group, and train none of it."""
    same = [token_f1("p q", ["p"]), token_f1("p q r s", ["p q r t u"])]
    assert same[0] != same[1] == pytest.approx(2 / 3)
    assert mixed_groups(same, [0, 0]) == [False]
    assert examples([trajectory(1)] * 2, same, [0, 0], refill=1) == []
