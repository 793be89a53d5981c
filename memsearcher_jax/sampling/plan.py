"""The sampler's large programs, lowered for devices that need not be there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered

from memsearcher_jax.model import qwen
from memsearcher_jax.model.axes import spec
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.sampling import sampler
from memsearcher_jax.sampling.config import SamplingConfig


def abstract_slots(model: ModelConfig, settings: SamplingConfig, prefix_tokens: int, mesh: Mesh) -> sampler.Slots:
    """The sampler's whole state as shapes, types and shardings, with room for a prefix of so many tokens."""
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(partial(sampler.empty_slots, model, settings, prefix_tokens))
    shardings = sampler.slot_shardings(mesh)
    return jax.tree.map(lambda x, lies: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies), shapes, shardings)


def abstract_weights(model: ModelConfig, mesh: Mesh) -> dict:
    """The sampler's weights likewise."""
    return jax.tree.map(
        lambda weight: jax.ShapeDtypeStruct(
            weight.shape, model.compute_dtype, sharding=NamedSharding(mesh, spec(weight.axes))
        ),
        qwen.declared(model),
    )


def lowered_programs(
    model: ModelConfig, settings: SamplingConfig, prefix_tokens: int, mesh: Mesh
) -> Iterator[tuple[str, Lowered]]:
    """(name, program) of decode, of prefill in every width, of the prefix with so many tokens, and of sharing."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    shardings = sampler.slot_shardings(mesh)
    copies = mesh.size // mesh.shape["tensor"]
    slots, params = abstract_slots(model, settings, prefix_tokens, mesh), abstract_weights(model, mesh)

    def placed(shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    with jax.set_mesh(mesh):
        key = jax.eval_shape(lambda: jax.random.key(0))
        decode = partial(sampler.decode, model, settings, (0,))
        decode = jax.jit(decode, donate_argnums=0, out_shardings=(shardings, None))
        yield "decode", decode.lower(slots, params, key)

        change = partial(jax.jit, donate_argnums=0, out_shardings=shardings)
        prefill = change(partial(sampler.prefill, model))
        for width in settings.prefill_buckets:
            pieces = copies * width // settings.prefill_piece
            block_BT, row_A = placed((copies, width), jnp.int32), placed((pieces,), jnp.int32)
            arguments = (slots, params, block_BT, block_BT, block_BT, row_A, row_A, placed((pieces,), bool))
            yield f"prefill, {copies} x {width}", prefill.lower(*arguments)

        hold_prefix = change(partial(sampler.hold_prefix, model))
        prefix_1W, count = placed((1, max(1, prefix_tokens)), jnp.int32), placed((), jnp.int32)
        yield "prefix", hold_prefix.lower(slots, params, prefix_1W, count)

        row_A = placed((copies * settings.rows_per_call,), jnp.int32)
        yield "share", change(sampler.share).lower(slots, row_A, row_A, row_A)
