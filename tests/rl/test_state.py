"""Where a run begins after rollbacks; tests/test_story.py restores whole runs."""

from types import SimpleNamespace

import pytest

from memsearcher_jax.config import RunConfig
from memsearcher_jax.rl import state


def test_each_rollback_multiplies_the_learning_rate():
    run, trainer = SimpleNamespace(config=RunConfig()), SimpleNamespace(with_learning_rate=lambda rate: rate)
    for rollbacks, expected in ((0, trainer), (2, pytest.approx(0.09 * 1e-6))):
        policy = state.RunState(run, trainer, "before")
        policy.restore("after", rollbacks)
        assert (policy.train, policy.trainer) == ("after", expected)
