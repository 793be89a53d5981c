"""The algorithm in one file trains as the product does, and is as short as it says."""

import re
from pathlib import Path

import pytest

from examples import minimal_grpo
from memsearcher_jax.configs.tiny import tiny

SOURCE = Path(minimal_grpo.__file__).read_text(encoding="utf-8")


def test_it_is_one_file_without_the_package_of_the_algorithm():
    assert len(SOURCE.splitlines()) <= 250
    assert not re.search(r"import memsearcher_jax\.rl|from memsearcher_jax(\.rl| import rl)", SOURCE)


@pytest.mark.slow
def test_it_trains_as_the_product_does(tmp_path):
    """Single runs of `launch/tpu_train.py --config tiny` end between .84 and .95 after 50 steps; 10 are run here."""
    before, after = minimal_grpo.train(tiny(), 10, tmp_path)
    assert before < 0.4
    assert after > 0.65
