"""The collectives of a weight, compiled for a TPU: what each device sends."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.ops.axes import all_gather_param, shard_map_by_rows
from memsearcher_jax.planning.tpu_plan import find_topology

AXES = ("vocab", "embed")
VOCAB = 151_936  # 1,187 tiles of 128 columns, a prime number
EMBED = 1_024


@pytest.fixture
def compiled_texts(tpu_compiler):
    """(topology, shape of its mesh, columns of a table) -> the compiled text of its use, and that of its gradient."""

    def compile_texts(topology, mesh_shape, columns):
        mesh = sharding.make_mesh(MeshConfig(*mesh_shape), find_topology(topology).devices)

        def product(table_VD, x_BD):
            return jnp.einsum("BD,VD->BV", x_BD, all_gather_param(table_VD, AXES))

        def gradient(table_VD, x_BD, dout_BV):
            _, pullback = jax.vjp(partial(product, x_BD=x_BD), table_VD)
            return pullback(dout_BV)[0]

        def array(shape, axes):
            return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding.named_sharding(mesh, axes))

        table_VD = array((VOCAB, columns), AXES)
        x_BD = array((64, columns), ("batch", None))
        dout_BV = array((64, VOCAB), ("batch", "vocab"))
        rows = ("batch", None)
        with jax.set_mesh(mesh):
            forward = jax.jit(lambda *arguments: shard_map_by_rows(product, (AXES, rows), rows)(*arguments))
            backward = jax.jit(
                lambda *arguments: shard_map_by_rows(gradient, (AXES, rows, rows), AXES)(*arguments),
                out_shardings=table_VD.sharding,
            )
            forward_text = forward.lower(table_VD, x_BD).compile().as_text()
            backward_text = backward.lower(table_VD, x_BD, dout_BV).compile().as_text()
        return forward_text, backward_text

    return compile_texts


def collectives(text):
    """(operation, columns of the vocabulary in its result) of each collective, from the compiled text."""
    pattern = r"= \w+\[([\d,]*)\]\S* (all-gather|all-reduce|reduce-scatter)\("
    found = set()
    for shape, operation in re.findall(pattern, text):
        found |= {(operation, int(size)) for size in shape.split(",") if size and int(size) > EMBED}
    return found


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("mesh_shape", "gathered", "scattered"),
    [((1, 2, 2), VOCAB // 2, VOCAB // 2), ((1, 4, 1), VOCAB, VOCAB + 128)],
    ids=["tensor", "fsdp"],
)
def test_a_table_is_gathered_and_its_gradient_scattered_by_parts(mesh_shape, gathered, scattered, compiled_texts):
    """No device sends the part of the vocabulary that another one computes with, and nothing is reduced as a whole."""
    forward_text, backward_text = compiled_texts("v5e:2x2", mesh_shape, EMBED)
    assert collectives(forward_text) == {("all-gather", gathered)}
    assert collectives(backward_text) == {("reduce-scatter", scattered)}


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("topology", "devices", "columns", "first_part"),
    [("v5e:4x4", 16, 896, 224), ("v5e:8x8", 64, 896, 112), ("v5e:8x8", 64, 2_560, 320)],
    ids=["qwen05b, 4x4", "qwen05b, 8x8", "qwen3_4b, 8x8"],
)
def test_the_gradient_of_a_table_with_few_columns_for_each_device(
    topology, devices, columns, first_part, compiled_texts
):
    """The compiler cannot scatter the last sum by these columns, and must not fail; the first sum it scatters."""
    _, backward_text = compiled_texts(topology, (1, devices, 1), columns)
    assert f"[{VOCAB + 128},{first_part}]" in backward_text
    assert ("reduce-scatter", VOCAB + 128) in collectives(backward_text)
