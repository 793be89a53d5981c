"""Micro-batches: one at a time, and those without tokens at the end not at all."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memsearcher_jax.training import logprobs, microbatches, update

MICROBATCHES = 8  # of two rows


def test_entries_after_the_count_are_not_read_and_their_outputs_stay():
    def body(total, x):
        return total + x, 2 * x

    scan = jax.jit(
        lambda count: microbatches.scan_first(body, 0.0, jnp.array([1.0, 2.0, jnp.nan]), jnp.zeros(3), count)
    )
    total, outputs = scan(2)
    assert total == 3
    np.testing.assert_array_equal(outputs, [2, 4, 0])


@pytest.fixture
def calls(monkeypatch):
    """Gains an entry whenever a micro-batch is computed on a device."""
    calls = []
    original = logprobs.token_logprobs

    def counted(*args, **settings):
        jax.debug.callback(lambda: calls.append(1))
        return original(*args, **settings)

    monkeypatch.setattr(logprobs, "token_logprobs", counted)
    monkeypatch.setattr(update, "token_logprobs", counted)
    return calls


@pytest.fixture
def rows(nano):
    """Rows whose first three micro-batches hold tokens."""
    filled_B = nano.batch.segment_BT.any(axis=1)
    assert filled_B.sum() >= 6
    some = jax.tree.map(lambda x: np.concatenate([x[filled_B][:6], 0 * x[:10]]), nano.batch)
    order_B = np.arange(16).reshape(MICROBATCHES, 2).T.ravel()  # micro-batch i of 8 is rows i and i + 8
    return jax.tree.map(lambda x: x[order_B], some)


def test_an_update_computes_no_empty_micro_batch(nano, rows, calls):
    optimizer = optax.sgd(1.0)
    config = replace(nano.training, grad_accum_steps=MICROBATCHES)
    with jax.set_mesh(nano.mesh()):
        step = update.make_update(nano.model, config, optimizer, nano.mesh(), temperature=1.0)
        state = update.init_state(nano.params(), nano.model, optimizer, nano.mesh())
        jax.block_until_ready(step(state, rows))
    jax.effects_barrier()
    assert len(calls) == 3


def test_log_probabilities_are_computed_of_no_empty_micro_batch(nano, rows, calls):
    config = replace(nano.training, grad_accum_steps=MICROBATCHES)
    with jax.set_mesh(nano.mesh()):
        logprob_fn = logprobs.make_logprob_fn.__wrapped__(nano.model, config, temperature=1.0)
        jax.block_until_ready(logprob_fn(nano.params(), rows))
    jax.effects_barrier()
    assert len(calls) == 3


@pytest.mark.variant
def test_an_update_holds_the_activations_of_one_micro_batch(nano):
    """Computed at once, those of all rows are in memory."""
    optimizer = optax.sgd(1.0)
    temporary = []
    with jax.set_mesh(nano.mesh()):
        state = update.init_state(nano.params(), nano.model, optimizer, nano.mesh())
        for steps in (1, MICROBATCHES):
            config = replace(nano.training, grad_accum_steps=steps)
            step = update.make_update(nano.model, config, optimizer, nano.mesh(), temperature=1.0)
            temporary.append(step.lower(state, nano.batch).compile().memory_analysis().temp_size_in_bytes)
    at_once, one_at_a_time = temporary
    assert one_at_a_time < at_once / 2
