import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.agent.types import Problem
from memsearcher_jax.data.problems import ProblemStream

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**32)
counts = st.integers(0, 100)


def stream(size, seed):
    return ProblemStream([Problem(str(row), f"{row}?", ("x",)) for row in range(size)], seed)


@given(sizes, seeds, st.integers(0, 5))
def test_every_epoch_is_a_permutation(size, seed, epoch):
    problems = stream(size, seed)
    assert sorted(problems.take(epoch * size, size), key=lambda p: int(p.id)) == list(problems.problems)


@given(sizes, seeds, counts, counts, counts)
def test_takes_join(size, seed, position, first, second):
    problems = stream(size, seed)
    whole = problems.take(position, first + second)
    assert len(whole) == first + second
    assert problems.take(position, first) + problems.take(position + first, second) == whole


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(p.id for p in stream(40, seed).take(epoch * 40, 40)) for seed in (0, 1) for epoch in (0, 1, 2)}
    assert len(orders) == 6


def test_the_order_is_fixed():
    """Written out once: with another order a resumed run would not go on with the problems it stopped before."""
    assert [problem.id for problem in stream(6, 3).take(4, 8)] == ["3", "0", "1", "2", "0", "4", "5", "3"]


def test_nothing_to_draw_from():
    with pytest.raises(ValueError, match=r"data\.train"):
        ProblemStream([], 0)
