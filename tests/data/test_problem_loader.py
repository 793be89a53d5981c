from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate

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
    for loader in (make_loader(size, seed), make_mixture([(size, 1.0), (3, 2.0)], seed)):
        batch = loader.batch(position, first + second)
        assert len(batch) == first + second
        assert loader.batch(position, first) + loader.batch(position + first, second) == batch


def test_order_is_stable_across_versions():
    """With another order, a resumed run would not continue with the problems that it had not trained on."""
    assert [problem.id for problem in make_loader(6, 3).batch(4, 8)] == ["3", "0", "1", "2", "0", "4", "5", "3"]


def test_loader_needs_problems():
    with pytest.raises(ValueError, match=r"data\.train"):
        ProblemLoader([], 0)


mixtures = st.lists(st.tuples(st.integers(1, 12), st.floats(0.1, 10)), min_size=1, max_size=4)


def make_mixture(mixture, seed):
    return replace(make_loader(sum(size for size, _ in mixture), seed), mixture=mixture)


def by_source(mixture, batch):
    """The rows of each source, counted from its first, in the order of the batch."""
    ends = list(accumulate(size for size, _ in mixture))
    found = [[] for _ in mixture]
    for row in (int(problem.id) for problem in batch):
        source = bisect_right(ends, row)
        found[source].append(row - ends[source] + mixture[source][0])
    return found


@given(mixtures, seeds, st.integers(0, 3))
def test_an_epoch_of_a_mixture_has_each_source_by_its_weight(mixture, seed, epoch):
    size = sum(size for size, _ in mixture)
    batch = make_mixture(mixture, seed).batch(epoch * size, size)
    for (_, weight), rows in zip(mixture, by_source(mixture, batch), strict=True):
        assert abs(len(rows) - size * weight / sum(weight for _, weight in mixture)) <= 1


@given(mixtures, seeds, st.integers(1, 5))
def test_the_problems_of_a_source_are_used_equally_often(mixture, seed, epochs):
    size = sum(size for size, _ in mixture)
    batch = make_mixture(mixture, seed).batch(0, epochs * size)
    for (source_size, _), rows in zip(mixture, by_source(mixture, batch), strict=True):
        uses = [rows.count(row) for row in range(source_size)]
        assert max(uses) - min(uses) <= 1


def test_the_order_of_a_mixture_is_stable_across_versions():
    loader = make_mixture([(4, 1.0), (2, 2.0)], 3)
    assert [problem.id for problem in loader.batch(3, 9)] == ["2", "4", "0", "3", "4", "1", "4", "5", "5"]
