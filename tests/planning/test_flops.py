"""FLOPs by formula agree with XLA's count and with published numbers."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from memsearcher_jax.model import qwen
from memsearcher_jax.model.config import REMAT, ModelConfig
from memsearcher_jax.planning.flops import forward_flops, training_flops

SEVEN_B = ModelConfig()
THREE_B = ModelConfig(151_936, 2_048, 11_008, 36, 16, 2, 128, tie_embeddings=True)
ROW_PAIRS = 8_192 * 8_193 / 2  # up to the diagonal


def test_the_formula_agrees_with_xla():
    """One layer, because XLA counts the body of a loop once; its attention computes all pairs."""
    config = ModelConfig(512, 256, 768, 1, 4, 2, 64, compute_dtype="float32")
    rows, tokens = 2, 64
    ids_BT = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    params = jax.eval_shape(lambda: qwen.init(jax.random.key(0), config))
    program = jax.jit(lambda *arguments: qwen.forward(arguments[0], config, *arguments[1:])[0])
    counted = program.lower(params, ids_BT, ids_BT, ids_BT).compile().cost_analysis()["flops"]
    work = forward_flops(config, rows * tokens, rows * tokens**2, rows * tokens)
    assert work.forward == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize(("model", "teraflops"), [(SEVEN_B, 129.3), (THREE_B, 60.5)])
def test_row_flops_of_published_sizes(model, teraflops):
    assert forward_flops(model, 8_192, ROW_PAIRS, 8_192).forward / 1e12 == pytest.approx(teraflops, rel=0.005)


def test_saved_activations_are_not_recomputed():
    work = forward_flops(SEVEN_B, 8_192, ROW_PAIRS, 2_048)
    flops = [training_flops(replace(SEVEN_B, remat=remat), work) for remat in REMAT]
    assert flops == sorted(set(flops))
    assert flops[0] == 3 * work.forward + work.output
    assert flops[-1] == 4 * work.forward - work.down


def test_lora_computes_no_gradients_of_weights():
    config = replace(SEVEN_B, remat="none")
    work = forward_flops(config, 8_192, ROW_PAIRS, 2_048)
    weight_gradients = training_flops(config, work) - training_flops(replace(config, lora_rank=16), work)
    assert weight_gradients == work.forward - work.attention
