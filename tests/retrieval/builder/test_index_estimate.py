"""The arithmetic of an estimate, and its constants against a real build."""

import numpy as np
import pytest

from memsearcher_jax.retrieval import scann_index
from memsearcher_jax.retrieval.builder import index_estimate
from memsearcher_jax.retrieval.builder.index_estimate import Rates

RATES = Rates(10_000, 1_000, 1e11, 1e8, 1e10)


def values(estimates):
    return {estimate.name: estimate.value for estimate in estimates}


def test_wikipedia_by_e5():
    lines = values(index_estimate.estimate(21_015_324, 768, "float16", RATES, hosts=8))
    assert lines["disk: embeddings"] == pytest.approx(32.28, abs=0.01)
    assert lines["disk: ScaNN"] == pytest.approx(21_015_324 * (1_536 + 256 + 4) / 1e9, rel=0.01)
    assert lines["host memory to search"] == pytest.approx(21_015_324 * (1_536 + 128 + 4) / 1e9, rel=0.01)
    assert lines["embedding"] == pytest.approx(21_015_324 / 1_000 / 8 / 3600)
    assert lines["total time"] == pytest.approx(
        sum(lines[name] for name in lines if name != "total time" and not name.startswith(("disk", "host")))
    )


def test_every_quantity_grows_with_the_rows():
    small, large = (values(index_estimate.estimate(rows, 384, "float32", RATES)) for rows in (10_000, 1_000_000))
    assert small.keys() == large.keys()
    assert all(large[name] > small[name] for name in small)


def test_every_estimate_shows_its_arithmetic():
    for line in index_estimate.estimate(1_000_000, 768, "bfloat16", RATES):
        assert any(digit in str(line) for digit in "123456789")
        assert "\n" not in str(line)


class FakeMachine:
    """A clock on which a tree takes the given seconds and everything else one second."""

    def __init__(self, monkeypatch, seconds_of):
        self.now, self.trees = 0.0, {leaves: iter(seconds) for leaves, seconds in seconds_of.items()}
        monkeypatch.setattr(index_estimate.time, "perf_counter", self.clock)
        monkeypatch.setattr(index_estimate.scann_index, "build_tree", self.build)
        monkeypatch.setattr(index_estimate, "SAMPLE_ROWS", 1_000)

    def clock(self):
        self.now += 0.5
        return self.now

    def build(self, vectors_RD, settings):
        self.now += next(self.trees[settings.leaves]) - 0.5


def embed(texts):
    return np.ones((len(texts), 64), np.float32)


def test_rates_use_the_fastest_of_several_trees(monkeypatch):
    FakeMachine(monkeypatch, {50: (9, 2, 3), 400: (7, 8, 5)})
    rates = index_estimate.measure_rates(embed, 64)
    work = [(12 * 1_000 + 1_000) * leaves * 64 for leaves in (50, 400)]
    assert rates.kmeans_ops == pytest.approx((work[1] - work[0]) / (5 - 2))
    assert rates.quantised_floats == pytest.approx(1_000 * 64 / (2 - work[0] / rates.kmeans_ops))


def test_a_busy_machine_is_an_error(monkeypatch):
    """A negative or zero difference of two times gives no rate."""
    FakeMachine(monkeypatch, {50: (9, 9, 9), 400: (9, 9, 9)})
    with pytest.raises(ValueError, match=r"too busy to measure: a tree of 400 leaves took 9\.0 s, one of 50 took"):
        index_estimate.measure_rates(embed, 64)


def test_the_estimated_size_of_scann_files(tmp_path):
    vectors = np.random.default_rng(0).standard_normal((6_000, 64), np.float32)
    tree = scann_index.build_tree(vectors, scann_index.untuned_settings(6_000, 64))
    scann_index.save_tree(tree, tmp_path / "scann")
    taken = sum(path.stat().st_size for path in (tmp_path / "scann").iterdir()) / 1e9
    assert values(index_estimate.estimate(6_000, 64, "float32", RATES))["disk: ScaNN"] == pytest.approx(taken, rel=0.05)
