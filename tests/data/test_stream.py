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


@given(sizes, seeds, counts, counts, st.integers(1, 7))
def test_the_shares_of_the_hosts_are_disjoint_and_the_whole(size, seed, position, count, hosts):
    problems = stream(size, seed)
    shares = [problems.share(position, count, host=host, hosts=hosts) for host in range(hosts)]
    assert [problem for share in shares for problem in share] == problems.take(position, count)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_run_goes_on_with_another_number_of_hosts():
    problems = stream(40, 0)
    first = [p for host in range(4) for p in problems.share(0, 20, host=host, hosts=4)]
    rest = [p for host in range(3) for p in problems.share(20, 20, host=host, hosts=3)]
    assert sorted(p.id for p in first + rest) == sorted(p.id for p in problems.problems)


@pytest.mark.parametrize("host", [-1, 2])
def test_no_such_host(host):
    with pytest.raises(ValueError, match=f"host {host} is not one of 2 hosts"):
        stream(4, 0).share(0, 2, host=host, hosts=2)
