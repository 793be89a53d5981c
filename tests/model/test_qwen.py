"""The forward pass: recorded logits of transformers, and input changes that must not change the output."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memsearcher_jax.model import projections, qwen, weights
from memsearcher_jax.model.config import REMAT, ModelConfig
from memsearcher_jax.model.kv_cache import Cache, CacheView
from memsearcher_jax.ops.quantization import quantize

GOLDEN = Path(__file__).with_name("golden_logits.npz")  # made by test_qwen_parity.py
QWEN3 = partial(ModelConfig, 151_936, family="qwen3")
SIZES = {  # published parameter counts
    "Qwen3-0.6B": (QWEN3(1_024, 3_072, 28, 16, 8, 128, tie_embeddings=True), 596_049_920),
    "Qwen3-8B": (QWEN3(4_096, 12_288, 36, 32, 8, 128), 8_190_735_360),
    "Qwen3-32B": (QWEN3(5_120, 25_600, 64, 64, 8, 128), 32_762_123_264),
}


def test_logits_equal_those_of_transformers(variant, make_folder, forward):
    name, config = variant
    _, params = weights.load(make_folder(config))
    with np.load(GOLDEN) as golden:
        ids_BT, logits_BTV = golden["ids"], golden[name]
    position_BT = np.tile(np.arange(ids_BT.shape[1]), (len(ids_BT), 1))
    ours_BTV, cache = forward(params, config, ids_BT, position_BT, np.ones_like(ids_BT))
    assert cache is None
    np.testing.assert_allclose(ours_BTV, logits_BTV, atol=1e-4, rtol=0)


def test_init_differs_by_layer_and_repeats_for_a_key(base):
    first, again = (qwen.init(jax.random.key(7), base) for _ in range(2))
    other = qwen.init(jax.random.key(8), base)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first["embed"], other["embed"])
    wq_LNHD = first["layers"]["wq"]
    assert not np.array_equal(wq_LNHD[0], wq_LNHD[1])
    np.testing.assert_allclose(jnp.std(wq_LNHD), base.embed_size**-0.5, rtol=0.1)
    assert not first["layers"]["bq"].any()
    assert (first["final_norm"] == 1).all()


@pytest.mark.parametrize("size", SIZES)
def test_published_sizes_have_the_published_parameter_counts(size, forward):
    config, count = SIZES[size]
    shapes = jax.eval_shape(lambda key: qwen.init(key, config), jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == count
    row = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    logits_BTV, _ = jax.eval_shape(lambda p, *rows: forward(p, config, *rows), shapes, row, row, row)
    assert (logits_BTV.shape, logits_BTV.dtype) == ((2, 16, config.vocab_size), jnp.float32)


def test_a_row_of_padding_is_finite_and_has_no_gradient(base, make_params, make_rows, forward):
    params = make_params(base)
    ids_BT, position_BT, segment_BT = make_rows(base, 2, 6)

    def loss(params, segment_BT):
        logits_BTV, _ = forward(params, base, ids_BT, position_BT, segment_BT)
        return jnp.sum(jnp.where(segment_BT[..., None] > 0, jnp.square(logits_BTV), 0))

    segment_BT[1] = 0
    padded = jax.jit(jax.grad(loss))(params, segment_BT)
    first = ids_BT[:1], position_BT[:1], segment_BT[:1]
    alone = jax.jit(jax.grad(lambda p: jnp.sum(jnp.square(forward(p, base, *first)[0]))))(params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), padded, alone)


@pytest.fixture(scope="module")
def gradient(base, make_params, make_rows, forward):
    """(config) -> the gradient of a loss; the weights are those of `base`."""
    params, rows = make_params(base), make_rows(base, 2, 6)
    return lambda config: jax.jit(jax.grad(lambda p: jnp.mean(jnp.square(forward(p, config, *rows)[0]))))(params)


@pytest.fixture(scope="module")
def base_gradient(base, gradient):
    return gradient(base)


@pytest.mark.parametrize("remat", REMAT[1:])
def test_remat_changes_no_gradient(remat, base, gradient, base_gradient):
    ours = gradient(replace(base, remat=remat))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-7), ours, base_gradient)


def test_remat_saves_less_for_the_backward_pass(base, make_params, make_rows):
    params, rows = make_params(base), make_rows(base, 2, 6)

    def saved_elements(config):
        """Number of elements saved for the backward pass."""
        backward = jax.eval_shape(lambda p: jax.vjp(lambda p: qwen.forward(p, config, *rows)[0], p)[1], params)
        return sum(x.size for x in jax.tree.leaves(backward))

    sizes = [saved_elements(replace(base, remat=remat)) for remat in reversed(REMAT)]
    assert sizes == sorted(set(sizes))


def test_bfloat16_compute_is_close_and_gives_float32_logits(base, make_params, make_rows, forward):
    params, rows = make_params(base), make_rows(base, 2, 6)
    exact_BTV, _ = forward(params, base, *rows)
    half = replace(base, compute_dtype="bfloat16")
    hidden_BTD, _ = forward(params, half, *rows, output="hidden")
    logits_BTV, _ = forward(params, half, *rows)
    assert (hidden_BTD.dtype, logits_BTV.dtype) == (jnp.bfloat16, jnp.float32)
    assert 0 < float(jnp.mean(jnp.abs(logits_BTV - exact_BTV))) < 0.05 * float(jnp.std(exact_BTV))
    # The sampler holds bfloat16 copies: it must see the numbers that training sees.
    copies = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    copied_BTV, _ = forward(copies, replace(half, param_dtype="bfloat16"), *rows)
    np.testing.assert_array_equal(copied_BTV, logits_BTV)


@pytest.mark.parametrize(
    ("subscripts", "x_shape", "weight_shape"),
    [
        ("BTD,FD->BTF", (2, 5, 4), (6, 4)),
        ("BTF,DF->BTD", (2, 5, 6), (4, 6)),
        ("BTD,NHD->BNTH", (2, 5, 4), (2, 3, 4)),
        ("BNTH,DNH->BTD", (2, 2, 5, 3), (4, 2, 3)),
    ],
)
def test_gradients_of_a_projection_are_those_of_the_product(subscripts, x_shape, weight_shape):
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in (x_shape, weight_shape))
    dout = rng.standard_normal(np.einsum(subscripts, x, weight).shape).astype(np.float32)

    def gradients(product):
        return jax.jit(lambda x, weight: jax.vjp(partial(product, subscripts), x, weight)[1](dout))(x, weight)

    ours, theirs = gradients(projections.project), gradients(jnp.einsum)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), ours, theirs)


def test_a_product_of_few_tokens_in_bfloat16_has_the_weight_first_and_the_same_result_on_a_cpu():
    x_BTD, weight_NHD = (
        jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        for seed, shape in enumerate([(2, 1, 256), (4, 64, 256)])
    )
    program = jax.jit(partial(projections.project, "BTD,NHD->BNTH"))
    expected_BNTH = np.einsum("BTD,NHD->BNTH", np.asarray(x_BTD, np.float64), np.asarray(weight_NHD, np.float64))
    np.testing.assert_allclose(np.asarray(program(x_BTD, weight_NHD), np.float64), expected_BNTH, rtol=2**-8, atol=1e-4)
    (dot,) = [line for line in program.lower(x_BTD, weight_NHD).as_text().splitlines() if "dot_general" in line]
    assert "(tensor<4x64x256xbf16>, tensor<2x1x256xbf16>)" in dot


def test_a_product_of_bfloat16_is_written_as_float32_on_a_cpu_and_rounded_once():
    x, y = (jax.random.normal(jax.random.key(seed), (16, 64), jnp.bfloat16) for seed in range(2))
    product = jax.jit(partial(projections.einsum, "TD,FD->TF"))
    exact = np.asarray(x, np.float64) @ np.asarray(y, np.float64).T
    np.testing.assert_allclose(np.asarray(product(x, y), np.float64), exact, rtol=2**-8, atol=1e-5)
    # On a TPU mesh the devices would exchange their parts of a product in float32.
    for platform, dtype in (("cpu", "f32"), ("tpu", "bf16")):
        program = product.trace(x, y).lower(lowering_platforms=(platform,)).as_text()
        (dot,) = [line for line in program.splitlines() if "dot_general" in line]
        assert dot.endswith(f"tensor<16x16x{dtype}>")


def rounded(weight, inputs):
    """(weight rounded to int8 with one scale for each output, scale), by numpy; the input axes come last."""
    scale = np.abs(weight).max(axis=tuple(range(-inputs, 0)), keepdims=True) / 127
    return np.round(weight / scale) * scale, scale


def test_a_product_in_int8_is_that_of_the_rounded_weight():
    rng = np.random.default_rng(0)
    x_BTD, weight_NHD = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 64), (4, 8, 64)))
    weight_NHD[0, 0] = 0  # has no scale
    values_NHD, scale_NH = quantize(weight_NHD, [2])
    exact_NHD, scale_NH1 = rounded(np.where(weight_NHD == 0, 1e-30, weight_NHD), 1)
    assert np.abs(exact_NHD - weight_NHD).max() <= 0.501 * scale_NH1.max()
    product_BNTH = projections.project("BTD,NHD->BNTH", x_BTD, projections.Int8Weight(values_NHD, scale_NH))
    np.testing.assert_allclose(product_BNTH, np.einsum("BTD,NHD->BNTH", x_BTD, exact_NHD), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_a_sampler_computes_the_same_from_published_weights(platform, dtype, base, make_params, make_rows, forward):
    params, rows = make_params(base), make_rows(base, 2, 12)
    published, specs = (qwen.publish(tree, base, platform, dtype) for tree in (params, qwen.param_specs(base)))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), published) == jax.tree.map(lambda x: (x.shape, x.dtype), specs)
    if dtype == "int8":
        axes = qwen.param_axes(base)["layers"]
        projected = {name: x for name, x in params["layers"].items() if "embed" in axes[name]}
        params = params | {"layers": params["layers"] | {name: rounded(x, 1)[0] for name, x in projected.items()}}
    view = CacheView.of(Cache.empty(base, 2, 16), jnp.array([[0], [1]]), *[jnp.zeros(2, int)] * 2)
    expected, ours = (jax.tree.leaves(forward(x, base, *rows, view)) for x in (params, published))
    for x, y in zip(ours, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=0 if (platform, dtype) == ("tpu", "float32") else 1e-5)


def test_a_cpu_gets_layers_in_arrays_of_their_own_unless_a_cache_holds_all(base):
    for config, listed in ((base, False), (replace(base, ffn_size=1 << 16), True)):
        published = qwen.publish(qwen.param_specs(config), config, "cpu", "float32")
        assert isinstance(published["layers"], list) == listed
