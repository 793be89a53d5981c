"""Rows that hold the common beginning of their contexts once: loss, gradient and log-probabilities stay the same."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memsearcher_jax.training.packing import pack
from memsearcher_jax.training.update import init_state
from tests.training.conftest import draw_examples

DESCENT = optax.sgd(1.0)


def drawn(name):
    """(examples, tokens per row) of each case."""
    rng = np.random.default_rng(0)
    one, other = rng.integers(0, 64, (2, 20))
    prompts = {"none": [[]], "one": [one], "several": [one, other[:9], []], "nested": [one, [*one, *other[:8]]]}[name]
    return draw_examples(prompts, (9, 6, 3)[: len(prompts)], 12, rng), 48


def rows_of(nano, case):
    """(shared, separate): the same contexts in shared rows and in a row each.

    Both have empty rows, so that one program computes all cases.
    """
    examples, seq_len = drawn(case)
    rng, count = np.random.default_rng(0), 32
    shared = pack(examples, seq_len, count, rng)
    alone = [pack([example], seq_len, 1, rng) for example in examples]
    alone += [jax.tree.map(np.zeros_like, alone[0])] * (count - len(alone))
    separate = jax.tree.map(lambda *rows: np.concatenate(rows), *alone)
    assert shared.ids_BT.shape == separate.ids_BT.shape
    assert (np.sum(shared.segment_BT > 0) < np.sum(separate.segment_BT > 0)) == (case != "none")
    return nano.with_reference(shared), nano.with_reference(separate)


def step(nano, batch, mesh, dtype="float32", **changes):
    """(minus the gradient, metrics) of one update by plain gradient descent."""
    model = replace(nano.model, compute_dtype=dtype, param_dtype=dtype, max_positions=batch.ids_BT.shape[1])
    rows, seq_len = batch.ids_BT.shape
    changes |= {"seq_len": seq_len, "minibatch_rows": rows, "max_grad_norm": np.inf}
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), nano.params())
    with jax.set_mesh(mesh):
        state = init_state(params, model, DESCENT, mesh)
        new_state, metrics = replace(nano, model=model).update(DESCENT, mesh, **changes)(state, batch)
    change = jax.tree.map(lambda new, old: np.asarray(new) - np.asarray(old), new_state.params, nano.params())
    return change, {name: float(value) for name, value in metrics.items() if name != "packing_efficiency"}


def assert_same(one, other, tolerance):
    for name, value in other[1].items():
        np.testing.assert_allclose(one[1][name], value, rtol=tolerance, atol=tolerance, err_msg=name)
    norm = other[1]["grad_norm"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * norm), one[0], other[0])


@pytest.mark.parametrize(
    ("case", "aggregate"),
    [
        ("none", "token-mean"),
        ("one", "token-mean"),
        ("several", "seq-mean-token-mean"),
        ("nested", "token-mean"),
        ("nested", "seq-mean-token-sum"),
    ],
)
def test_packing_and_sharing_change_neither_loss_nor_gradient(nano, case, aggregate):
    shared, separate = (step(nano, rows, nano.mesh(), aggregate=aggregate) for rows in rows_of(nano, case))
    assert 0 < shared[1]["clip_fraction"] < 1
    assert_same(shared, separate, 1e-5)


def test_sharing_is_exact_in_float64(nano, monkeypatch):
    """All arithmetic that the model does in float32 is done in float64."""
    with jax.enable_x64(True):
        monkeypatch.setattr(jnp, "float32", jnp.float64)
        shared, separate = rows_of(nano, "several")
        one, other = (step(nano, rows, nano.mesh(), "float64") for rows in (shared, separate))
    assert one[0]["embed"].dtype == np.float64
    assert_same(one, other, 1e-10)


def check_sharing(nano, *mesh, **changes):
    shared, separate = rows_of(nano, "several")
    one = step(nano, shared, nano.mesh(*mesh), **changes)
    assert_same(one, step(nano, separate, nano.mesh()), 1e-5)


@pytest.mark.slow
def test_sharing_on_eight_devices(nano):
    check_sharing(nano, 2, 2, 2, grad_accum_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 16, 1), (2, 4, 2)])
def test_sharing_on_sixteen_devices(mesh):
    """In a process of its own, because the tests have eight. Over 16 of "fsdp" gradients are scattered in two steps."""
    code = (
        f"from tests.training import conftest, test_shared_prefix as t; t.check_sharing(conftest.make_nano(), *{mesh})"
    )
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=16"
    subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], env=os.environ | {"XLA_FLAGS": flags}, check=True
    )
