"""The arithmetic of a plan, and that its constants are what a build really needs."""

import numpy as np
import pytest

from memsearcher_jax.retrieval import approximate, plan
from memsearcher_jax.retrieval.plan import Rates

RATES = Rates(10_000, 1_000, 1e11, 1e8, 1e10)


def named(lines):
    return {line.name: line.value for line in lines}


def test_wikipedia_by_e5():
    lines = named(plan.plan(21_015_324, 768, "float16", RATES, hosts=8))
    assert lines["disk: embeddings"] == pytest.approx(32.28, abs=0.01)
    assert lines["disk: ScaNN"] == pytest.approx(21_015_324 * (1_536 + 256 + 4) / 1e9, rel=0.01)
    assert lines["host memory to search"] == pytest.approx(21_015_324 * (1_536 + 128 + 4) / 1e9, rel=0.01)
    assert lines["embedding"] == pytest.approx(21_015_324 / 1_000 / 8 / 3600)
    assert lines["in all"] == pytest.approx(
        sum(lines[name] for name in lines if name != "in all" and not name.startswith(("disk", "host")))
    )


def test_more_of_everything_for_more():
    small, large = (named(plan.plan(rows, 384, "float32", RATES)) for rows in (10_000, 1_000_000))
    assert small.keys() == large.keys()
    assert all(large[name] > small[name] for name in small)


def test_every_line_shows_its_arithmetic():
    for line in plan.plan(1_000_000, 768, "bfloat16", RATES):
        assert any(digit in str(line) for digit in "123456789")
        assert "\n" not in str(line)


class Machine:
    """A clock that only made-up work moves: a tree takes these seconds, everything else one."""

    def __init__(self, monkeypatch, seconds_of):
        self.now, self.trees = 0.0, {leaves: iter(seconds) for leaves, seconds in seconds_of.items()}
        monkeypatch.setattr(plan.time, "perf_counter", self.clock)
        monkeypatch.setattr(plan.approximate, "build_tree", self.build)
        monkeypatch.setattr(plan, "SAMPLE_ROWS", 1_000)

    def clock(self):
        self.now += 0.5
        return self.now

    def build(self, vectors_RD, shape):
        self.now += next(self.trees[shape.leaves]) - 0.5


def embed(texts):
    return np.ones((len(texts), 64), np.float32)


def test_rates_come_from_the_quickest_of_several_trees(monkeypatch):
    Machine(monkeypatch, {50: (9, 2, 3), 400: (7, 8, 5)})
    rates = plan.measure(embed, 64)
    work = [(12 * 1_000 + 1_000) * leaves * 64 for leaves in (50, 400)]
    assert rates.compared_numbers == pytest.approx((work[1] - work[0]) / (5 - 2))
    assert rates.coded_numbers == pytest.approx(1_000 * 64 / (2 - work[0] / rates.compared_numbers))


def test_a_busy_machine_is_not_planned_with(monkeypatch):
    """A tree that takes no time would make 21 million passages a matter of seconds."""
    Machine(monkeypatch, {50: (9, 9, 9), 400: (9, 9, 9)})
    with pytest.raises(ValueError, match=r"too busy to be measured: a tree of 400 leaves took 9\.0 s, one of 50 took"):
        plan.measure(embed, 64)


def test_scann_takes_the_disk_that_is_planned(tmp_path):
    vectors = np.random.default_rng(0).standard_normal((6_000, 64), np.float32)
    tree = approximate.build_tree(vectors, approximate.shape_for(6_000, 64))
    approximate.save_tree(tree, tmp_path / "scann")
    taken = sum(path.stat().st_size for path in (tmp_path / "scann").iterdir()) / 1e9
    assert named(plan.plan(6_000, 64, "float32", RATES))["disk: ScaNN"] == pytest.approx(taken, rel=0.05)
