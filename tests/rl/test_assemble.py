import numpy as np
import pytest

from memsearcher_jax.agent.types import Context, Outcome, Problem, Stop, Trajectory
from memsearcher_jax.rl.assemble import assemble


def trajectory(contexts: int, sampled: bool = True) -> Trajectory:
    context = Context((5, 6, 7), (0.0, -1.0, -2.0), (False, sampled, sampled))
    return Trajectory(Problem("q", "?", ("a",)), 0, Outcome(Stop.ANSWERED), (context,) * contexts, "")


def test_every_context_carries_its_trajectorys_advantage():
    samples = assemble([trajectory(3), trajectory(1)], [1.0, 0.0], [0, 0])
    assert [round(sample.advantage, 3) for sample in samples] == [0.707] * 3 + [-0.707]


def test_long_trajectories_do_not_shift_the_mean_of_their_group():
    """The reward is normalised before contexts exist."""
    short = assemble([trajectory(1), trajectory(1), trajectory(1)], [1.0, 0.0, 0.1], [0, 0, 0])
    long = assemble([trajectory(5), trajectory(1), trajectory(2)], [1.0, 0.0, 0.1], [0, 0, 0])
    assert [long[0].advantage, long[5].advantage, long[6].advantage] == [sample.advantage for sample in short]


def test_groups_are_normalised_apart():
    samples = assemble([trajectory(1)] * 4, [1.0, 0.0, 5.0, 5.0], [0, 0, 1, 1])
    np.testing.assert_allclose([sample.advantage for sample in samples], [0.7071, -0.7071, 0, 0], atol=1e-4)


def test_even_groups_can_be_left_out():
    samples = assemble([trajectory(2)] * 4, [1.0, 0.0, 0.1, 0.1], [0, 0, 1, 1], even_groups=False)
    assert [round(sample.advantage, 3) for sample in samples] == [0.707] * 2 + [-0.707] * 2
    assert assemble([trajectory(1)] * 2, [1.0, 1.0], [0, 0], even_groups=False) == []


def test_the_last_context_alone_can_be_trained():
    """The advantages stay what they are: the ablation changes who carries them, not how they are normalised."""
    first, last = Context((5, 6), (0.0, -1.0), (False, True)), Context((7, 8), (0.0, -2.0), (False, True))
    long = Trajectory(Problem("q", "?", ("a",)), 0, Outcome(Stop.ANSWERED), (first, last), "")
    samples = assemble([long, trajectory(1)], [1.0, 0.0], [0, 0], last_only=True)
    assert [sample.ids.tolist() for sample in samples] == [[7, 8], [5, 6, 7]]
    assert [round(sample.advantage, 3) for sample in samples] == [0.707, -0.707]


def test_contexts_in_which_nothing_was_said_are_left_out():
    assert len(assemble([trajectory(2, sampled=False), trajectory(1)], [0.0, 1.0], [0, 0])) == 1


def test_ids_masks_and_logprobs_are_the_sampled_ones():
    (sample,) = assemble([trajectory(1)], [1.0], [0])
    assert sample.ids.tolist() == [5, 6, 7]
    assert sample.sampled.tolist() == [False, True, True]
    assert sample.logprobs.tolist() == pytest.approx([0.0, -1.0, -2.0])
