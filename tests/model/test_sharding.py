"""Meshes of eight fake devices give the numbers of one device; meshes that do not divide a model are refused."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.model.kv_cache import CACHE_AXES, Cache, CacheView
from memsearcher_jax.ops.axes import AXIS_RULES, MESH_AXES, _reduce_scatter_groups

MESHES = [(2, 2, 2), (1, 8, 1)]


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [((2, 2, 2), (2, 2, 2)), ((1, -1, 1), (1, 8, 1)), ((-1, 2, 2), (2, 2, 2)), ((2, 4, -1), (2, 4, 1))],
)
def test_a_mesh_uses_every_device(sizes, shape):
    mesh = sharding.make_mesh(MeshConfig(*sizes))
    assert mesh.axis_names == MESH_AXES
    assert mesh.devices.shape == shape
    assert mesh.devices.ravel().tolist() == jax.devices()
    assert mesh.axis_types == (AxisType.Auto,) * 3


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, -1, 1), "mesh data=3 fsdp=-1 tensor=1 does not fit 8 devices"),
        ((2, 2, 1), "mesh data=2 fsdp=2 tensor=1 does not fit 8 devices"),
        ((4, 2, 2), "must multiply to 8"),
        ((-1, -1, 1), "-1 .* at most once"),
        ((0, 8, 1), "must be 1 or more"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_in_one_line(sizes, message):
    with pytest.raises(ValueError, match=message) as error:
        sharding.make_mesh(MeshConfig(*sizes))
    assert "\n" not in str(error.value)


def test_every_weight_has_a_logical_axis_per_dimension(variant):
    _, config = variant
    for weight in jax.tree.leaves(qwen.param_specs(config)):
        assert len(weight.axes) == len(weight.shape)
        assert set(weight.axes) <= set(AXIS_RULES)
        over = [mesh_axis for axis in weight.axes for mesh_axis in AXIS_RULES[axis]]
        assert len(over) == len(set(over)), "a mesh axis cannot split two dimensions of one weight"
        assert "head" not in weight.axes or not AXIS_RULES["head"]  # weights.py reads whole heads


@pytest.mark.parametrize(
    ("changes", "mesh_shape", "message"),
    [
        ({}, {"tensor": 4}, "mesh tensor=4 cannot split the 2 kv of layers.bk: choose a divisor of 2"),
        ({}, {"data": 1, "fsdp": 3, "tensor": 1}, "mesh fsdp=3 cannot split the 32 embed of embed"),
        ({"vocab_size": 97}, {"data": 2, "fsdp": 2, "tensor": 2}, "cannot split the 97 vocab of embed"),
        ({"ffn_size": 49}, {"data": 1, "fsdp": 1, "tensor": 2}, "cannot split the 49 ffn of layers.down"),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_refused(changes, mesh_shape, message, base):
    config = replace(base, **changes)
    with pytest.raises(ValueError, match=message):
        sharding.check_divides(config, mesh_shape)


@pytest.mark.parametrize(("platform", "attention"), [("tpu", "splash"), ("cpu", "xla"), ("gpu", "xla")])
def test_attention_is_selected_for_the_devices_of_the_mesh(platform, attention, base):
    """Those of this process may be others. An explicit setting stays."""
    mesh = SimpleNamespace(devices=np.full((1, 2, 1), SimpleNamespace(platform=platform)))
    base = replace(base, attention="auto", head_size=16)
    assert sharding.select_attention(base, mesh, 256) == replace(base, attention=attention)
    for explicit in {"xla", attention}:
        config = replace(base, attention=explicit)
        assert sharding.select_attention(config, mesh, 256) == config
    if platform != "tpu":
        with pytest.raises(ValueError, match=f"model.attention splash does not run on a {platform}: set it to auto"):
            sharding.select_attention(replace(base, attention="splash"), mesh, 256)
    else:  # before a first rollout, not after it
        with pytest.raises(ValueError, match=r"rows .*of 200 tokens.*training.seq_len"):
            sharding.select_attention(base, mesh, 200)


@pytest.fixture(scope="module")
def one_device(base, make_params, make_rows):
    """(step, its arguments, its results on one device, initial weights); `step` gives (gradient, logits_BTV)."""
    # Packed and padded rows, so that every mask is sharded too.
    rows = make_rows(base, 8, 6)[0], np.tile([0, 1, 2, 0, 1, 0], (8, 1)), np.tile([1, 1, 1, 2, 2, 0], (8, 1))
    arguments = make_params(base), *rows

    def loss(params, *rows):
        logits_BTV, _ = qwen.forward(params, base, *rows)
        return jnp.sum(jnp.where(rows[2][..., None] > 0, jnp.square(logits_BTV), 0)) / logits_BTV.size, logits_BTV

    step = jax.grad(loss, has_aux=True)
    return step, arguments, jax.jit(step)(*arguments), qwen.init(jax.random.key(3), base)


@pytest.mark.parametrize("sizes", MESHES)
def test_a_mesh_gives_the_weights_logits_and_gradients_of_one_device(sizes, base, one_device):
    step, (params, *rows), (gradient, logits_BTV), start = one_device
    mesh = sharding.make_mesh(MeshConfig(*sizes))
    with jax.set_mesh(mesh):
        shardings = sharding.param_shardings(base, mesh)
        mesh_init = jax.jit(lambda key: qwen.init(key, base), out_shardings=shardings)
        mesh_start = mesh_init(jax.random.key(3))
        placed = jax.device_put(rows, sharding.named_sharding(mesh, ("batch", None)))
        mesh_step = jax.jit(step, out_shardings=(shardings, None))
        mesh_gradient, mesh_logits_BTV = mesh_step(jax.device_put(params, shardings), *placed)
    assert len(mesh_logits_BTV.sharding.device_set) == 8
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), mesh_start, start)
    real = rows[2] > 0
    np.testing.assert_allclose(np.asarray(mesh_logits_BTV)[real], np.asarray(logits_BTV)[real], atol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), mesh_gradient, gradient)


@pytest.mark.parametrize(
    ("train", "local", "dtype", "copied"),
    [
        ((8, 1, 1), (8, 1, 1), "float32", False),
        ((1, 2, 4), (2, 1, 4), "float32", True),  # gathered
        ((8, 1, 1), (8, 1, 1), "bfloat16", True),
        ((8, 1, 1), (8, 1, 1), "int8", True),
    ],
)
def test_weights_that_nobody_else_uses_are_published_without_a_copy_if_they_keep_their_form(
    train, local, dtype, copied, base
):
    config = replace(base, heads=4, kv_heads=4)
    mesh = sharding.make_mesh(MeshConfig(*train))
    local_mesh = sharding.make_mesh(MeshConfig(*local))
    params = jax.jit(qwen.init, static_argnums=1, out_shardings=sharding.param_shardings(config, mesh))(
        jax.random.key(0), config
    )
    expected = sharding.publish(params, config, local_mesh, dtype)
    published = sharding.publish(params, config, local_mesh, dtype, owned=True)
    jax.tree.map(np.testing.assert_array_equal, published, expected)

    def buffers(tree):
        return {shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for shard in x.addressable_shards}

    assert buffers(expected).isdisjoint(buffers(params))
    assert (buffers(published) == buffers(params)) == (not copied)


def test_no_collective_moves_the_cache(base, make_params, make_rows, forward):
    """Same numbers as the full forward, and no collective of the program is as large as a row of the cache."""
    params, (ids_BT, position_BT, segment_BT) = make_params(base), make_rows(base, 4, 5)
    expected_BTV, _ = forward(params, base, ids_BT, position_BT, segment_BT)
    page_tokens = 1024
    table_BN = jnp.array([[0], [1], [0], [1]])  # a page for each row, numbered within the pages of its devices
    mesh = sharding.make_mesh(MeshConfig(2, 2, 2))
    with jax.set_mesh(mesh):
        params = jax.device_put(params, sharding.param_shardings(base, mesh))
        cache = jax.jit(lambda: Cache.empty(base, 8, page_tokens))()
        assert cache.k_LPKHE.sharding.is_equivalent_to(sharding.named_sharding(mesh, CACHE_AXES), 5)

        @partial(jax.jit, donate_argnums=1)
        def step(params, cache, ids_BT, position_BT, segment_BT):
            view = CacheView.of(cache, table_BN, position_BT[:, 0], position_BT[:, 0])
            return qwen.forward(params, base, ids_BT, position_BT, segment_BT, view)

        logits = []
        for part in (slice(0, 3), slice(3, 4), slice(4, 5)):
            logits_BTV, cache = step(params, cache, ids_BT[:, part], position_BT[:, part], segment_BT[:, part])
            logits.append(logits_BTV)
        program = step.lower(params, cache, ids_BT[:, :1], position_BT[:, :1], segment_BT[:, :1]).compile().as_text()
    np.testing.assert_allclose(jnp.concatenate(logits, axis=1), expected_BTV, atol=1e-5)
    moved = [line for line in program.splitlines() if " all-gather(" in line or " all-to-all(" in line]
    assert moved, "the program of this mesh must gather weights, or the search below proves nothing"
    assert not [line for line in program.splitlines() if f",{page_tokens}" in line and " all-" in line]


def test_a_single_row_runs_on_a_mesh_of_eight(base, make_params, make_rows, forward):
    """Rows that the devices do not divide are replicated, in the activations and in the cache."""
    params, rows = make_params(base), make_rows(base, 1, 4)
    expected_BTV, _ = forward(params, base, *rows)
    mesh = sharding.make_mesh(MeshConfig(2, 2, 2))
    with jax.set_mesh(mesh):
        params = jax.device_put(params, sharding.param_shardings(base, mesh))
        zeros_1 = np.zeros(1, np.int32)
        view = jax.jit(CacheView.of)(Cache.empty(base, 1, 8), zeros_1[None], zeros_1, zeros_1)
        logits_BTV, cache = forward(params, base, *rows, view)
    np.testing.assert_allclose(logits_BTV, expected_BTV, atol=1e-5)
    written_E = np.any(np.asarray(cache.v_LPKEH) != 0, axis=(0, 1, 2, 4))
    assert written_E.tolist() == [True] * 4 + [False] * 4


def test_reshard_casts_moves_and_compiles_once(base, make_params, compilations):
    params = make_params(base)
    train, serve = (sharding.make_mesh(MeshConfig(*sizes)) for sizes in ((1, 8, 1), (4, 1, 2)))
    placed = jax.device_put(params, sharding.param_shardings(base, train))
    target = sharding.param_shardings(base, serve)
    with compilations() as compiled:
        first, second = (sharding.cast_program(target)(placed, dtype="bfloat16") for _ in range(2))
    assert len(compiled) == 1
    for path, weight in jax.tree.leaves_with_path(first):
        assert weight.dtype == jnp.bfloat16, path
        assert weight.sharding.mesh == serve, path
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    jax.tree.map(np.testing.assert_array_equal, first, expected)
    jax.tree.map(np.testing.assert_array_equal, second, expected)
    assert not placed["embed"].is_deleted()


@pytest.mark.parametrize("devices", [8, 16, 32, 64])
def test_two_reduce_scatter_steps_equal_one(devices):
    """Simulated with numpy: a second step needs more devices than run here."""
    held = np.random.default_rng(0).integers(100, size=(devices, 2 * devices))
    total = held.sum(axis=0)
    for groups in _reduce_scatter_groups(devices):
        parts = {}
        for group in groups or [range(devices)]:
            psum_grad = np.sum([held[member] for member in group], axis=0)
            parts |= dict(zip(group, np.split(psum_grad, len(group)), strict=True))
        held = [parts[device] for device in range(devices)]
    np.testing.assert_array_equal(held, total.reshape(devices, -1))
