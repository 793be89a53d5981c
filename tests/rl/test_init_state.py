"""Where a run begins after rollbacks; tests/test_story.py restores whole runs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from memsearcher_jax.config import RunConfig
from memsearcher_jax.rl import init_state
from memsearcher_jax.runtime.health import HealthState


def test_each_rollback_multiplies_the_learning_rate():
    config = RunConfig()
    config = replace(
        config,
        training=replace(config.training, learning_rate=2e-6),
        health=replace(config.health, rollback_lr_factor=0.5),
    )
    run, trainer = SimpleNamespace(config=config), SimpleNamespace(with_learning_rate=lambda rate: rate)
    assert init_state._after_rollbacks(run, trainer, HealthState()) is trainer
    assert init_state._after_rollbacks(run, trainer, HealthState(rollbacks=2)) == pytest.approx(0.5e-6)
