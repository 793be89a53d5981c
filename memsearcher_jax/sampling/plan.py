"""The sampler's large programs, compiled for devices that need not be there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from memsearcher_jax.model import qwen
from memsearcher_jax.model.axes import spec
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.sampling import sampler
from memsearcher_jax.sampling.config import SamplingConfig


def compiled_programs(model: ModelConfig, settings: SamplingConfig, mesh: Mesh) -> Iterator[tuple[str, Compiled]]:
    """(name, program) of decode, of prefill in every width, and of sharing, all at the whole cache: the largest.

    What the compiler raises for a program that does not fit a device is let through.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    shardings = sampler.slot_shardings(mesh)
    copies = mesh.size // mesh.shape["tensor"]
    window = settings.context_tokens

    def placed(shape: tuple[int, ...], dtype, sharding=everywhere) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(partial(sampler.empty_slots, model, settings))
        slots = jax.tree.map(lambda x, sharding: placed(x.shape, x.dtype, sharding), shapes, shardings)
        params = jax.tree.map(
            lambda weight: placed(weight.shape, model.compute_dtype, NamedSharding(mesh, spec(weight.axes))),
            qwen.declared(model),
        )
        key = jax.eval_shape(lambda: jax.random.key(0))
        decode = partial(sampler.decode, model, settings, (0,))
        decode = jax.jit(decode, donate_argnums=0, static_argnames="window", out_shardings=(shardings, None))
        yield f"decode, {window} cached", decode.lower(slots, params, key, window=window).compile()

        change = partial(jax.jit, donate_argnums=0, static_argnames="window", out_shardings=shardings)
        prefill = change(partial(sampler.prefill, model))
        for width in settings.prefill_buckets:
            rows = copies * settings.rows_at(width)
            row_A = placed((rows,), jnp.int32)
            arguments = (slots, params, placed((rows, width), jnp.int32), row_A, row_A, row_A)
            name = f"prefill, {rows} x {width}, {window} cached"
            yield name, prefill.lower(*arguments, window=window).compile()

        row_A = placed((copies * settings.prefill_rows,), jnp.int32)
        yield (
            f"share, {window} cached",
            change(sampler.share).lower(slots, row_A, row_A, row_A, window=window).compile(),
        )
