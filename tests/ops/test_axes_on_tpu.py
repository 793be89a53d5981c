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
def test_a_table_is_gathered_and_its_gradient_scattered_by_parts(mesh_shape, gathered, scattered, monkeypatch):
    """No device sends the part of the vocabulary that another one computes with, and nothing is reduced as a whole."""
    pytest.importorskip("libtpu", reason="no TPU compiler: install the extra 'tpu'")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    mesh = sharding.make_mesh(MeshConfig(*mesh_shape), find_topology("v5e:2x2").devices)

    def product(table_VD, x_BD):
        return jnp.einsum("BD,VD->BV", x_BD, all_gather_param(table_VD, AXES))

    def gradient(table_VD, x_BD, dout_BV):
        _, pullback = jax.vjp(partial(product, x_BD=x_BD), table_VD)
        return pullback(dout_BV)[0]

    def array(shape, axes):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding.named_sharding(mesh, axes))

    table_VD = array((VOCAB, EMBED), AXES)
    x_BD = array((64, EMBED), ("batch", None))
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
    assert collectives(forward_text) == {("all-gather", gathered)}
    assert collectives(backward_text) == {("reduce-scatter", scattered)}
