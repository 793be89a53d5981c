import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.data.problems import ProblemLoader
from memsearcher_jax.types import Problem

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**32)
counts = st.integers(0, 100)


def make_loader(size, seed):
    return ProblemLoader([Problem(str(row), f"{row}?", ("x",)) for row in range(size)], seed)


@given(sizes, seeds, st.integers(0, 5))
def test_every_epoch_is_a_permutation(size, seed, epoch):
    loader = make_loader(size, seed)
    assert sorted(loader.batch(epoch * size, size), key=lambda p: int(p.id)) == list(loader.problems)


@given(sizes, seeds, counts, counts, counts)
def test_consecutive_batches_concatenate(size, seed, position, first, second):
    loader = make_loader(size, seed)
    batch = loader.batch(position, first + second)
    assert len(batch) == first + second
    assert loader.batch(position, first) + loader.batch(position + first, second) == batch


def test_order_is_stable_across_versions():
    """With another order, a resumed run would not continue with the problems that it had not trained on."""
    assert [problem.id for problem in make_loader(6, 3).batch(4, 8)] == ["3", "0", "1", "2", "0", "4", "5", "3"]


def test_loader_needs_problems():
    with pytest.raises(ValueError, match=r"data\.train"):
        ProblemLoader([], 0)
