"""The simulated rollout: by hand where it is known, and what carrying over changes."""

from dataclasses import replace

import pytest

from memsearcher_jax.planning.rollout_tail import context_seconds, drawn_tokens, sampled_tokens, simulate
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.types import Context, Outcome, Problem, ScoredTrajectory, StopReason, Trajectory

SETTINGS = RLConfig(steps=12, prompts_per_step=8, group_size=2)


def test_equal_trajectories_fill_their_slots():
    """16 trajectories of two contexts of three seconds in 8 slots."""
    for step in simulate([[3.0, 3.0]], slots=8, hosts=1, settings=SETTINGS):
        assert (step.seconds, step.idle_share) == pytest.approx((12.0, 0.0), abs=1e-6)
    for step in simulate([[3.0, 3.0]], slots=16, hosts=2, settings=SETTINGS):  # half of the problems, on each host
        assert (step.seconds, step.idle_share) == pytest.approx((6.0, 0.5), abs=1e-6)


def test_carrying_over_shortens_the_tail():
    tokens = drawn_tokens(200, max_turns=8, mean_tokens=100.0, max_tokens=512)
    seconds = context_seconds(tokens, token_seconds=0.01, search_seconds=0.5)

    def mean(bound):
        steps = simulate(seconds, slots=8, hosts=1, settings=replace(SETTINGS, carry_over=bound))[2:-2]
        return sum(step.seconds for step in steps) / len(steps), sum(step.idle_share for step in steps) / len(steps)

    waiting, carrying = mean(0), mean(1)
    assert carrying[0] < 0.9 * waiting[0] and carrying[1] < 0.6 * waiting[1]


def test_all_work_is_done_whatever_is_carried():
    """Busy seconds, over all steps and less those of interrupted contexts, are those of the trajectories."""
    seconds = [[1.0], [1.0, 2.0, 4.0], [0.5, 0.5]]
    busy, interrupted = [], []
    for bound in (0, 1, 3):
        steps = simulate(seconds, slots=4, hosts=1, settings=replace(SETTINGS, carry_over=bound))
        interrupted.append(sum(4 * step.seconds * step.interrupted_share for step in steps))
        busy.append(sum(4 * step.seconds * (1 - step.idle_share) for step in steps) - interrupted[-1])
    assert busy == pytest.approx([busy[0]] * 3, rel=1e-4)
    assert interrupted[0] == 0 and min(interrupted[1:]) > 0


def test_lengths_of_recorded_trajectories():
    contexts = [Context((1,) * 4, (0.0,) * 4, (False, True, True, done)) for done in (False, True)]
    scored = ScoredTrajectory(
        Trajectory(Problem("q", "?", ()), 0, Outcome(StopReason.ANSWERED), tuple(contexts), ""), 1.0
    )
    assert sampled_tokens([scored]) == [[2, 3]]
    assert context_seconds([[2, 3]], token_seconds=0.1, search_seconds=1.0) == [pytest.approx([1.2, 0.3])]
    with pytest.raises(ValueError, match="no trajectories to draw from"):
        simulate([[]], slots=4, hosts=1, settings=SETTINGS)
