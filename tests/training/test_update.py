"""The update: its results, what must not change them, its memory, and gradients that are not finite.

Plain gradient descent with rate 1 makes the change of the weights the gradient itself, so that gradients are compared
through the same compiled step that trains.
"""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import optax
import pytest

from memsearcher_jax.model import lora, sharding
from memsearcher_jax.training import losses, masked
from memsearcher_jax.training.config import TrainingConfig
from memsearcher_jax.training.logprobs import token_logprobs
from memsearcher_jax.training.update import abstract_state, fit_to_mesh, init_state, make_optimizer, make_update

DESCENT = optax.sgd(1.0)
ADAM = make_optimizer(replace(TrainingConfig(), learning_rate=3e-3))


def step(nano, batch, *, optimizer=DESCENT, mesh=None, **changes):
    """One update of the initial weights: (change of the weights, metrics) on the host. Gradients are not clipped."""
    mesh, changes = mesh or nano.mesh(), {"max_grad_norm": np.inf} | changes
    with jax.set_mesh(mesh):
        state = init_state(nano.params(), nano.model, optimizer, mesh)
        new_state, metrics = nano.update(optimizer, mesh, **changes)(state, batch)
    change = jax.tree.map(lambda new, old: np.asarray(new) - np.asarray(old), new_state.params, nano.params())
    return change, {name: float(value) for name, value in metrics.items()}


def loss_and_metrics(weights, nano):
    scores = token_logprobs(weights, nano.model, nano.batch, chunk=16, temperature=1.0)
    weight_BT = masked.token_weights(nano.batch.mask_BT, nano.training.aggregate, nano.batch.segment_BT)
    return losses.grpo_loss(nano.training, scores, nano.batch, weight_BT)


@pytest.fixture(scope="module")
def plain(nano):
    return step(nano, nano.batch)


def assert_same_step(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), one[0], other[0])
    for name in one[1].keys() - {"packing_efficiency"}:  # of the rows that were computed, as laid out
        np.testing.assert_allclose(one[1][name], other[1][name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def lora_gradient(nano):
    """(model, adapters, the gradient of the loss through the weights that they make), on the host."""
    model, base = replace(nano.model, lora_rank=2, lora_alpha=4.0), nano.params()
    adapters = jax.tree.map(lambda x: x + 0.02, jax.device_get(lora.init(jax.random.key(1), model)))

    def loss(adapters):
        return loss_and_metrics(lora.merge(base, adapters, model), nano)[0]

    return model, adapters, jax.device_get(jax.jit(jax.grad(loss))(adapters))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])
def test_adapters_are_trained_by_the_gradient_of_the_merged_weights(nano, shape, lora_gradient):
    """And by nothing else: the base is not donated, and the state holds no moments of it."""
    model, before, expected = lora_gradient
    mesh, base = nano.mesh(*shape), nano.params()
    config = replace(nano.training, grad_accum_steps=4, max_grad_norm=np.inf)
    with jax.set_mesh(mesh):
        state = init_state(before, model, DESCENT, mesh)
        placed = jax.device_put(base, sharding.param_shardings(model, mesh))
        update = make_update(model, config, DESCENT, mesh, temperature=1.0)
        new_state, metrics = update(state, nano.batch, placed)
    change = jax.tree.map(lambda new, old: np.asarray(new) - old, new_state.params, before)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, -b, rtol=1e-3, atol=2e-6), change, expected)
    assert metrics["grad_norm"] > 1e-3
    jax.tree.map(np.testing.assert_array_equal, placed, base)
    moments = abstract_state(model, ADAM, mesh).opt_state
    assert sum(x.size for x in jax.tree.leaves(moments)) < 3 * sum(x.size for x in jax.tree.leaves(expected))


def test_the_weights_move_by_the_gradient_of_the_loss(nano, plain):
    differentiate = jax.jit(jax.grad(partial(loss_and_metrics, nano=nano), has_aux=True))
    gradient, metrics = jax.device_get(differentiate(nano.params()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, -b, rtol=1e-3, atol=2e-6), plain[0], gradient)
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(gradient)))
    for name, value in (metrics | {"grad_norm": norm, "skipped": 0}).items():
        np.testing.assert_allclose(plain[1][name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_eight_devices_train_like_one(nano, plain):
    assert_same_step(plain, step(nano, nano.batch, mesh=nano.mesh(2, 2, 2), grad_accum_steps=2))


def test_empty_micro_batches_are_not_computed(nano, plain):
    """Non-empty ones come first, as `pack` orders them; packing_efficiency counts the computed ones."""
    filled_B = nano.batch.segment_BT.any(axis=1)
    order_B = np.argsort(~filled_B, kind="stable").reshape(8, 2).T.ravel()  # part i of 8 is rows i, i + 8
    rows = jax.tree.map(lambda x: x[order_B], nano.batch)
    packed = step(nano, rows, grad_accum_steps=8)
    assert_same_step(plain, packed)
    computed = 2 * -(-filled_B.sum() // 2)
    assert computed < len(filled_B)
    tokens = np.count_nonzero(rows.segment_BT)
    np.testing.assert_allclose(packed[1]["packing_efficiency"], tokens / (computed * nano.training.seq_len), rtol=1e-6)
    np.testing.assert_allclose(plain[1]["packing_efficiency"], tokens / rows.ids_BT.size, rtol=1e-6)


def test_a_non_finite_gradient_leaves_the_state_unchanged(nano):
    mesh = nano.mesh()
    old_logprob_BT = nano.batch.old_logprob_BT.copy()
    old_logprob_BT[tuple(np.argwhere(nano.batch.mask_BT)[0])] = np.nan
    bad = replace(nano.batch, old_logprob_BT=old_logprob_BT)
    with jax.set_mesh(mesh):
        update = nano.update(ADAM, mesh)
        state, metrics = update(init_state(nano.params(), nano.model, ADAM, mesh), nano.batch)
        assert metrics["skipped"] == 0
        before = jax.device_get(state)
        state, metrics = update(state, bad)
        assert metrics["skipped"] == 1 and not np.isfinite(metrics["grad_norm"])
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
        state, metrics = update(state, nano.batch)
    assert metrics["skipped"] == 0 and state.step == 2


def test_the_state_is_donated_and_the_step_compiles_once(nano, compilations):
    mesh, optimizer = nano.mesh(2, 2, 2), nano.adam
    with jax.set_mesh(mesh):
        update = nano.update(optimizer, mesh)
        first = init_state(nano.params(), nano.model, optimizer, mesh)
        state, _ = update(first, nano.batch)
        with compilations() as compiled:
            for _ in range(2):
                state, _ = update(state, nano.batch)
    assert compiled == []
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    expected = abstract_state(nano.model, optimizer, mesh)
    jax.tree.map(lambda x, e: x.sharding.is_equivalent_to(e.sharding, x.ndim) or pytest.fail(str(e)), state, expected)


def test_rows_that_do_not_divide_over_the_devices_are_refused(nano):
    with pytest.raises(ValueError, match=r"minibatch_rows 6 does not divide over 4 devices .*: choose a mul"):
        nano.update(DESCENT, nano.mesh(2, 2, 2), minibatch_rows=6)


@pytest.mark.parametrize(
    ("rows", "wished", "shape", "made"),
    [
        (16, 8, (1, 1, 1), 8),
        (16, 8, (2, 2, 2), 4),
        (16, 8, (2, 4, 1), 2),
        (24, 4, (2, 4, 1), 3),
        (256, 8, (1, 8, 1), 8),
    ],
)
def test_grad_accum_steps_are_lowered_for_many_devices(nano, rows, wished, shape, made):
    """Each device has equally many rows, at least one, in each micro-batch."""
    settings = replace(nano.training, minibatch_rows=rows, grad_accum_steps=wished)
    assert fit_to_mesh(settings, nano.mesh(*shape)) == replace(settings, grad_accum_steps=made)
