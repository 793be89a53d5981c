"""The plan of the learning rate: its units, its values, and the rate that an update takes."""

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.checks import check
from memsearcher_jax.config import RunConfig
from memsearcher_jax.configs.qwen import search_r1_3b
from memsearcher_jax.ranges import Duration
from memsearcher_jax.rl.config import RLConfig
from memsearcher_jax.rl.setup import with_steps
from memsearcher_jax.training.config import TrainingConfig, learning_rate_plan, with_plan
from memsearcher_jax.training.objective import Grpo
from memsearcher_jax.training.trainer import Trainer
from memsearcher_jax.training.update import init_state, learning_rate, make_optimizer, make_update


def plan_of(warmup, decay="0", steps=20):
    return learning_rate_plan(TrainingConfig(learning_rate=1e-3, warmup_steps=warmup, decay_steps=decay), steps)


@pytest.mark.parametrize(
    ("warmup", "decay", "counts", "unit", "text"),
    [
        ("0", "0", (0, 0), "steps", "begins at 0.001 and is constant"),
        ("286", "0", (286, 0), "steps", "rises to 0.001 in 286 steps, then is constant"),
        ("5%", "end", (1, 19), "steps", "rises to 0.001 in 1 steps, then falls to 0 at step 20"),
        ("2 steps", "90%", (2, 18), "steps", "rises to 0.001 in 2 steps, then falls to 0 at step 20"),
        (
            "10 updates",
            "800 updates",
            (10, 800),
            "updates",
            "rises to 0.001 in 10 updates, then falls to 0 at update 810",
        ),
        ("0", "800 updates", (0, 800), "updates", "begins at 0.001 and falls to 0 at update 800"),
    ],
)
def test_durations_are_steps_shares_of_the_run_or_updates(warmup, decay, counts, unit, text):
    plan = plan_of(warmup, decay)
    assert (plan.warmup, plan.decay) == tuple(Duration(count, unit) for count in counts)
    assert str(plan) == text
    config = with_plan(TrainingConfig(learning_rate=1e-3), plan)
    assert learning_rate_plan(config) == plan, "it no longer depends on the length of the run"


@pytest.mark.parametrize(
    ("warmup", "decay", "steps", "message"),
    [
        ("ten", "0", 20, "training.warmup_steps is 'ten': give training steps"),
        ("-1", "0", 20, "training.warmup_steps is '-1'"),
        ("0", "999999999 updates", 20, "training.decay_steps is '999999999 updates'"),
        ("0", "end", None, "training.decay_steps is 'end': give training steps"),
        ("5%", "0", None, "training.warmup_steps is 5%, but the number of training steps is not known"),
        ("10", "800 updates", 20, "warmup_steps 10 and training.decay_steps 800 updates differ in their unit"),
    ],
)
def test_what_no_plan_can_be_made_of_is_refused(warmup, decay, steps, message):
    with pytest.raises(ValueError, match=message):
        plan_of(warmup, decay, steps)


@given(st.integers(1, 5_000), st.integers(1, 100))
def test_shares_that_make_up_the_run_end_with_it(steps, percent):
    """The warm-up is rounded down, but the end is that of the run, whatever its length."""
    plan = plan_of(f"{percent}%", f"{100 - percent}%", steps)
    assert plan.warmup.count == steps * percent // 100
    if percent < 100:
        assert plan.warmup.count + plan.decay.count == steps


@given(st.integers(1, 5_000), st.integers(0, 50), st.integers(1, 100), st.booleans())
def test_a_decay_that_ends_within_the_last_step_is_accepted(steps, warmup, percent, is_share):
    """In whatever unit the warm-up is: only a step that would begin at a rate of 0 is refused."""
    exact_warmup = Fraction(steps * warmup, 100) if is_share else Fraction(warmup)
    begins_last_step_above_zero = exact_warmup + Fraction(steps * percent, 100) > steps - 1
    decay = f"{percent}%"
    if begins_last_step_above_zero:
        plan = plan_of(f"{warmup}%" if is_share else f"{warmup} steps", decay, steps)
        assert plan.warmup.count + plan.decay.count >= steps
    else:
        with pytest.raises(ValueError, match="set it to end"):
            plan_of(f"{warmup}%" if is_share else f"{warmup} steps", decay, steps)


def test_shares_that_leave_a_part_of_the_run_at_a_rate_of_zero_are_refused():
    with pytest.raises(ValueError, match="the learning rate is 0 from training step 29 of 30 on: set it to end"):
        plan_of("5%", "90%", 30)


def test_a_run_that_goes_on_at_a_rate_of_zero_is_refused():
    config = RunConfig(rl=RLConfig(steps=20), training=TrainingConfig(warmup_steps="2", decay_steps="10"))
    with pytest.raises(ValueError, match="the learning rate is 0 from training step 12 of 20 on: set it to end"):
        with_steps(check(config), 24)
    with_steps(replace(config, training=replace(config.training, decay_steps="end")), 24)
    epochs = check(replace(config, rl=replace(config.rl, epochs=2, prompts_per_step=4)))
    assert with_steps(epochs, 24).rl.steps == 12
    with pytest.raises(ValueError, match="the learning rate is 0 from training step 12 of 14 on"):
        with_steps(epochs, 28)


def test_search_r1_warms_up_over_286_training_steps_of_four_updates():
    config = search_r1_3b()
    assert config.rl.prompts_per_step * config.rl.group_size == 4 * config.training.minibatch_contexts
    rate = [float(learning_rate(config.training, 4 * step, step)) for step in (0, 142, 285, 499)]
    np.testing.assert_allclose(rate, np.multiply(config.training.learning_rate, [1 / 286, 0.5, 1, 1]), rtol=1e-6)


def test_a_training_step_at_a_rate_of_zero_is_reported(nano):
    """The number of updates of a step is not known in advance, so a plan in updates cannot be checked before."""
    config = replace(nano.training, decay_steps="800 updates", kl_coefficient=0.0)
    metrics = {"learning_rate": np.float32(0), "skipped": np.float32(0)}
    trainer = Trainer(config, nano.mesh(), Grpo(), lambda state, *_: (state, dict(metrics)), None, None)
    message = (
        r"^training changes nothing any more: the learning rate is 0, it begins at .* falls to 0 at update 800; set"
    )
    with pytest.warns(UserWarning, match=message):
        trainer.step(SimpleNamespace(params={}), nano.examples, np.random.default_rng(0), print, 130)


@pytest.mark.parametrize("unit", ["steps", pytest.param("updates", marks=pytest.mark.slow)])
def test_the_rate_rises_decays_to_zero_and_is_taken_by_the_update(nano, unit):
    config = replace(nano.training, learning_rate=1.0, warmup_steps=f"2 {unit}", decay_steps=f"4 {unit}")
    numbers = {"steps": lambda i: (99, i), "updates": lambda i: (i, 99)}[unit]
    rates = [float(learning_rate(config, *numbers(i))) for i in range(8)]
    np.testing.assert_allclose(rates, [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0])
    optimizer, mesh = make_optimizer(config), nano.mesh()
    with jax.set_mesh(mesh):
        update = make_update(nano.model, config, optimizer, mesh, temperature=1.0)
        state, before = init_state(nano.params(), nano.model, optimizer, mesh), nano.params()["embed"]
        state, metrics = update(state, nano.batch, training_step=np.int32(5))
    expected = {"steps": 0.25, "updates": 0.5}[unit]
    assert metrics["learning_rate"] == expected
    # The first step of Adam moves a weight by the rate, and weight decay adds a little.
    np.testing.assert_allclose(np.abs(state.params["embed"] - before).max(), expected, rtol=0.05)
