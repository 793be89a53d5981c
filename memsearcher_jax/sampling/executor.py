"""Runs device calls: one jitted program for each type of call, on a donated cache. Lowers them for planning, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.stages import Lowered, Wrapped

from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.kv_cache import CACHE_AXES, Cache
from memsearcher_jax.model.qwen import Params
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.sampling.decode import Decode, DecodeOutput, decode
from memsearcher_jax.sampling.prefill import CopyPages, Prefill, copy_pages, prefill
from memsearcher_jax.sampling.scheduler import Scheduler


class Executor:
    """The KV cache of one engine on its devices, and the programs that change it."""

    def __init__(self, model: ModelConfig, settings: SamplingConfig, stop_ids: tuple[int, ...], mesh: Mesh):
        self._mesh = mesh
        self._programs = _programs(model, settings, stop_ids, mesh)
        self._empty_cache = jax.jit(partial(_empty_cache, model, settings, mesh), out_shardings=_cache_shardings(mesh))
        self._cache: Cache | None = None

    def allocate(self) -> None:
        """Takes device memory for the cache, unless it holds some."""
        if self._cache is None:
            with jax.set_mesh(self._mesh):
                self._cache = self._empty_cache()

    def release(self) -> None:
        """Gives the cache's device memory back."""
        self._cache = None

    def run(self, calls: Iterable[CopyPages | Prefill], params: Params) -> None:
        """Dispatches the calls in order."""
        with jax.set_mesh(self._mesh):
            for call in calls:
                self._cache = self._programs[type(call)](self._cache, params, call)

    def decode(self, call: Decode, params: Params, root_key: Array) -> DecodeOutput:
        """Dispatches the call; the output is still on the devices."""
        with jax.set_mesh(self._mesh):
            self._cache, output = self._programs[Decode](self._cache, params, root_key, call)
        return output


def abstract_cache(model: ModelConfig, settings: SamplingConfig, mesh: Mesh) -> Cache:
    """Shapes, types and shardings of the cache of an executor."""
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(partial(_empty_cache, model, settings, mesh))
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, _cache_shardings(mesh)
    )


def lower_programs(model: ModelConfig, settings: SamplingConfig, mesh: Mesh) -> Iterator[tuple[str, Lowered]]:
    """(name, program) of decoding, of prefill in every width, and of copying pages."""
    programs = _programs(model, settings, (0,), mesh)
    cache = abstract_cache(model, settings, mesh)
    params = sharding.abstract_params(model, mesh, model.compute_dtype)
    (copies, *prefills), decodes = Scheduler(settings, replica_count(mesh)).warm_up_calls()

    def abstract(x: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.named_sharding(mesh, ()))

    with jax.set_mesh(mesh):
        root_key = jax.eval_shape(lambda: jax.random.key(0))
        yield "decode", programs[Decode].lower(cache, params, root_key, jax.tree.map(abstract, decodes[-1]))
        for call in prefills:
            assert isinstance(call, Prefill)
            name = f"prefill, {call.ids_BT.shape[0]} x {call.ids_BT.shape[1]}"
            yield name, programs[Prefill].lower(cache, params, jax.tree.map(abstract, call))
        yield "copy_pages", programs[CopyPages].lower(cache, params, jax.tree.map(abstract, copies))


def _programs(
    model: ModelConfig, settings: SamplingConfig, stop_ids: tuple[int, ...], mesh: Mesh
) -> dict[type, Wrapped]:
    return {
        CopyPages: _cache_program(copy_pages, mesh),
        Prefill: _prefill_program(model, mesh),
        Decode: _decode_program(model, settings.decode_steps_per_call, settings.speculative_tokens, stop_ids, mesh),
    }


# Engines of one process that differ in slots or sampling rules have the same programs: they are traced once.


@lru_cache(maxsize=8)
def _prefill_program(model: ModelConfig, mesh: Mesh) -> Wrapped:
    return _cache_program(partial(prefill, model), mesh)


@lru_cache(maxsize=8)
def _decode_program(
    model: ModelConfig, tokens_per_call: int, draft_tokens: int, stop_ids: tuple[int, ...], mesh: Mesh
) -> Wrapped:
    function = partial(decode, model, tokens_per_call, draft_tokens, stop_ids)
    return jax.jit(function, donate_argnums=0, out_shardings=(_cache_shardings(mesh), None))


def _cache_program(function: Callable[..., Cache], mesh: Mesh) -> Wrapped:
    return jax.jit(function, donate_argnums=0, out_shardings=_cache_shardings(mesh))


def _empty_cache(model: ModelConfig, settings: SamplingConfig, mesh: Mesh) -> Cache:
    replicas = replica_count(mesh)
    return Cache.empty(model, settings.pages_per_replica(replicas) * replicas, settings.page_tokens)


def _cache_shardings(mesh: Mesh) -> Cache:
    """Pages over the data-parallel axes, heads over the tensor axis."""
    pool = sharding.named_sharding(mesh, CACHE_AXES)
    return Cache(pool, pool)  # pyright: ignore[reportArgumentType]  # where `Cache` has arrays


def replica_count(mesh: Mesh) -> int:
    """Copies of the weights on the mesh, each with its own slots and pages."""
    return mesh.size // mesh.shape["tensor"]
