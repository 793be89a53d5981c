"""The policy that a run trains: its learning rate after rollbacks, and whether it is finite."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from memsearcher_jax.config import RunConfig
from memsearcher_jax.rl.state import RunState
from memsearcher_jax.training.config import TrainingConfig


def test_each_rollback_lowers_the_learning_rate():
    """By the same factor, from the rate of the settings, whether the run rolls back or resumes after rollbacks."""
    config = RunConfig(training=TrainingConfig(learning_rate=1.0))
    rates = []

    def with_learning_rate(rate):
        rates.append(rate)
        return trainer

    trainer = SimpleNamespace(with_learning_rate=with_learning_rate)
    state = RunState(SimpleNamespace(config=config), trainer, train=None)
    for rollbacks in (0, 1, 2):
        state.restore(f"after {rollbacks}", rollbacks)
    assert rates == pytest.approx([0.3, 0.09]) and state.train == "after 2"


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_one_number_that_is_not_finite_is_found(value):
    weights = {"embed": jnp.zeros((3, 4), jnp.bfloat16), "layers": {"wq": jnp.ones((2, 5))}}
    state = RunState(None, None, train=SimpleNamespace(params=weights))
    assert state.weights_are_finite()
    weights["layers"]["wq"] = weights["layers"]["wq"].at[1, 4].set(value)
    assert not state.weights_are_finite()
