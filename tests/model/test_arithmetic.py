"""Work by formula, against what XLA counts in the program itself and against numbers that others have."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from memsearcher_jax.model import qwen
from memsearcher_jax.model.arithmetic import forward_work, row_work, training_flops
from memsearcher_jax.model.config import ModelConfig

SEVEN_B = ModelConfig()
THREE_B = ModelConfig(151_936, 2_048, 11_008, 36, 16, 2, 128, tied=True)


def test_the_formula_counts_what_xla_counts():
    """Of one layer, because XLA counts the body of a loop once; there, scores are of all pairs."""
    config = ModelConfig(512, 256, 768, 1, 4, 2, 64, compute_dtype="float32")
    rows, tokens = 2, 64
    ids_BT = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    params = jax.eval_shape(lambda: qwen.init(jax.random.key(0), config))
    program = jax.jit(lambda *arguments: qwen.forward(arguments[0], config, *arguments[1:])[0])
    counted = program.lower(params, ids_BT, ids_BT, ids_BT).compile().cost_analysis()["flops"]
    work = forward_work(config, rows * tokens, rows * tokens**2, rows * tokens)
    assert work.forward == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize(("model", "teraflops"), [(SEVEN_B, 129.3), (THREE_B, 60.5)])
def test_a_row_of_the_published_sizes(model, teraflops):
    assert row_work(model, 8_192, 8_192).forward / 1e12 == pytest.approx(teraflops, rel=0.005)


def test_what_is_kept_is_not_computed_again():
    work = row_work(SEVEN_B, 8_192, 2_048)
    flops = [
        training_flops(replace(SEVEN_B, remat=remat), work) for remat in ("none", "projections", "attention", "full")
    ]
    assert flops == sorted(flops) and len(set(flops)) == 4
    assert flops[0] == 3 * work.forward + work.output
    assert flops[3] == 4 * work.forward - work.last
