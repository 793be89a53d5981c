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


def test_scann_takes_the_disk_that_is_planned(tmp_path):
    vectors = np.random.default_rng(0).standard_normal((6_000, 64), np.float32)
    tree = approximate.build_tree(vectors, approximate.shape_for(6_000, 64))
    approximate.save_tree(tree, tmp_path / "scann")
    taken = sum(path.stat().st_size for path in (tmp_path / "scann").iterdir()) / 1e9
    assert named(plan.plan(6_000, 64, "float32", RATES))["disk: ScaNN"] == pytest.approx(taken, rel=0.05)
