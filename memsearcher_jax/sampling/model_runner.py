"""Runs device calls: one jitted program for each type of call, on a donated cache. Lowers them for planning, too."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
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
from memsearcher_jax.ops.kernel_errors import way_around_kernels
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.sampling.decode import Decode, DecodeOutput, DecodeState, decode
from memsearcher_jax.sampling.prefill import CopyPages, Prefill, copy_pages, prefill
from memsearcher_jax.sampling.scheduler import ScheduledStep, Scheduler


class ModelRunner:
    """The KV cache of some replicas on their devices, and the programs that run on it."""

    def __init__(self, model: ModelConfig, settings: SamplingConfig, stop_ids: tuple[int, ...], mesh: Mesh):
        self._mesh = mesh
        self._programs = _programs(model, settings, stop_ids, mesh)
        self._empty_cache = _empty_cache(model, settings, mesh)
        self._empty_state = _empty_state(settings, mesh)
        self._cache: Cache | None = None
        self._state: DecodeState | None = None

    def release(self) -> None:
        """Gives the device memory of cache and state back; the next step takes it again."""
        self._cache = None
        self._state = None

    def run(self, step: ScheduledStep, params: Params, root_key: Array) -> DecodeOutput | None:
        """Dispatches the calls of a step in order; the output of decoding is still on the devices, as `params` are."""
        with jax.set_mesh(self._mesh), way_around_kernels("sampling.attention"):
            self.wait(params)
            if self._cache is None or self._state is None:
                self._cache = self._empty_cache()
                self.wait()
                self._state = self._empty_state()
            for call in step.calls:
                self.wait()
                self._cache = self._programs[type(call)](self._cache, params, call)
            if step.decode is None:
                return None
            self.wait()
            decode = self._programs[Decode]
            self._cache, self._state, output = decode(self._cache, self._state, params, root_key, step.decode)
        return output

    def wait(self, params: Params | None = None) -> None:
        """On several CPU devices, waits for the programs under way, and for that which makes the weights.

        Programs that run there at the same time can wait for each other for ever. Other devices have a queue.
        """
        device = self._mesh.devices.flat[0]
        if device.platform == "cpu" and self._mesh.size > 1:
            jax.block_until_ready((params, self._cache, self._state))

    def is_done(self, output: DecodeOutput) -> bool:
        """Whether the devices have finished the calls of the step with this output."""
        return output.count_A.is_ready()


def abstract_cache(model: ModelConfig, settings: SamplingConfig, mesh: Mesh) -> Cache:
    """Shapes, types and shardings of the cache of a model runner."""
    with jax.set_mesh(mesh):
        return jax.eval_shape(_empty_cache(model, settings, mesh))


def abstract_params(model: ModelConfig, settings: SamplingConfig, mesh: Mesh) -> Params:
    """Shapes, types and shardings of the weights of a model runner."""
    specs = sharding.sampler_specs(model, mesh, settings.weights_dtype(model.compute_dtype))
    return sharding.abstract_arrays(specs, mesh)


def lower_programs(model: ModelConfig, settings: SamplingConfig, mesh: Mesh) -> Iterator[tuple[str, Lowered]]:
    """(name, program) of decoding, of prefill in every width, and of copying pages."""
    programs = _programs(model, settings, (0,), mesh)
    cache = abstract_cache(model, settings, mesh)
    with jax.set_mesh(mesh):
        state = jax.eval_shape(_empty_state(settings, mesh))
    params = abstract_params(model, settings, mesh)
    steps = Scheduler(settings, replica_count(mesh)).warm_up_steps()
    copies = steps[0].calls[0]
    prefills = steps[0].calls[1:]
    largest = steps[-1].decode

    def abstract(x: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.named_sharding(mesh, ()))

    def lower(call: CopyPages | Prefill) -> Lowered:
        return programs[type(call)].lower(cache, params, jax.tree.map(abstract, call))

    assert largest is not None, "the last step decodes"
    with jax.set_mesh(mesh):
        root_key = jax.eval_shape(lambda: jax.random.key(0))
        yield "decode", programs[Decode].lower(cache, state, params, root_key, jax.tree.map(abstract, largest))
        for call in prefills:
            assert isinstance(call, Prefill)
            rows, width = call.ids_BT.shape
            yield f"prefill, {rows} x {width}", lower(call)
        yield "copy_pages", lower(copies)


def _programs(
    model: ModelConfig, settings: SamplingConfig, stop_ids: tuple[int, ...], mesh: Mesh
) -> dict[type, Wrapped]:
    model = replace(model, attention=settings.attention)
    return {
        CopyPages: _program(copy_pages, mesh),
        Prefill: _program(prefill, mesh, model),
        Decode: _program(decode, mesh, model, settings.decode_steps_per_call, stop_ids),
    }


@lru_cache(maxsize=24)
def _program(function: Callable, mesh: Mesh, *settings: Hashable) -> Wrapped:
    """Engines of one process that differ in slots or sampling rules have the same programs: they are traced once."""
    cache = sharding.named_sharding(mesh, CACHE_AXES)
    if function is decode:
        out_shardings = (cache, sharding.named_sharding(mesh, ()), None)
        return jax.jit(partial(function, *settings), donate_argnums=(0, 1), out_shardings=out_shardings)
    return jax.jit(partial(function, *settings), donate_argnums=0, out_shardings=cache)


def _empty_cache(model: ModelConfig, settings: SamplingConfig, mesh: Mesh) -> Wrapped:
    """A program without arguments that creates the cache."""
    replicas = replica_count(mesh)
    pages = settings.pages_per_replica(replicas) * replicas
    empty = partial(Cache.empty, model, pages, settings.page_tokens, int8=settings.kv == "int8")
    return jax.jit(empty, out_shardings=sharding.named_sharding(mesh, CACHE_AXES))


def _empty_state(settings: SamplingConfig, mesh: Mesh) -> Wrapped:
    """A program without arguments that creates the state, of which every device has a copy."""
    return jax.jit(partial(DecodeState.empty, settings.slots), out_shardings=sharding.named_sharding(mesh, ()))


def replica_count(mesh: Mesh) -> int:
    """Copies of the weights on the mesh, each with its own slots and pages."""
    return mesh.size // mesh.shape["tensor"]
