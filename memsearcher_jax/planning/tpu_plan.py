"""What the programs of a run need on a TPU slice: they are compiled for the slice, which need not be present.

Nothing is executed and no weights are allocated. Bytes and FLOPs are those of one device.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh
from jax.stages import Lowered

from memsearcher_jax.config import RunConfig
from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.planning import roofline
from memsearcher_jax.planning.flops import forward_flops, row_flops, training_flops
from memsearcher_jax.planning.hlo import schedule
from memsearcher_jax.planning.roofline import TpuSlice, make_slice
from memsearcher_jax.runtime.meshes import Meshes, make_meshes
from memsearcher_jax.sampling import model_runner
from memsearcher_jax.training import update
from memsearcher_jax.training.config import TrainingConfig, learning_rate_plan, with_plan
from memsearcher_jax.training.logprobs import make_logprob_fn
from memsearcher_jax.training.packing import PACKED_DTYPES, PackedBatch
from memsearcher_jax.training.trainer import update_program

REPORT_SECONDS = 10  # between lines while a program compiles


class DoesNotFitError(Exception):
    """A program exceeds the memory of a device. The message is one line."""


@dataclass(frozen=True)
class Program:
    """A compiled program. Bytes and FLOPs are of one device and one call."""

    name: str
    argument_bytes: int
    temp_bytes: int
    peak_bytes: int  # arguments, results and temporaries at the peak
    donated_bytes: int  # of the arguments, reused for results
    total_bytes: int  # at the peak, with what the run keeps allocated that is no argument
    flops: float  # by formula
    sent_bytes: float  # over links; with one micro-batch
    operations: float  # scheduled: those of loop bodies times trips
    cycles: float  # the compiler's estimate, without kernels and collectives; 0: unknown
    compile_seconds: float


@dataclass(frozen=True)
class ResidentMemory:
    """What a run keeps allocated on each device between programs, in bytes.

    The state is always there; the sampler's weights and slots during rollouts alone; the reference always, or only
    while it is used (`training.offload_reference`).
    """

    params: int  # of the train state
    opt_state: int
    reference: int
    sampler_params: int
    slots: int  # the sampler's KV cache and state
    offload_reference: bool = False

    @property
    def state(self) -> int:
        return self.params + self.opt_state

    @property
    def training(self) -> int:
        """While the state is updated or published."""
        return self.state + (0 if self.offload_reference else self.reference)

    @property
    def rollout(self) -> int:
        """While contexts are sampled."""
        return self.training + self.sampler_params + self.slots


@dataclass(frozen=True)
class Topology:
    """The devices of a TPU slice, which need not be present."""

    name: str
    devices: Sequence[sharding.Device]
    host_devices: Sequence[sharding.Device]  # of one host
    tpu_slice: TpuSlice

    def meshes(self, config: RunConfig) -> Meshes:
        return make_meshes(config, self.devices, self.host_devices)


def find_topology(name: str) -> Topology:
    """The topology with a name such as v5e:4x8. Raises ValueError if libtpu is missing or does not know it."""
    generation, _, shape = name.partition(":")
    lengths = [int(length) for length in shape.split("x")]
    try:
        devices = topologies.get_topology_desc(name, platform="tpu").devices
        # The compiler refuses programs for a subset of a slice, so the devices of a host become a slice of their own.
        coords = [device.coords for device in devices if device.process_index == devices[0].process_index]
        host_shape = "x".join(str(len(set(values))) for values in list(zip(*coords, strict=True))[: len(lengths)])
        host_devices = devices
        if host_shape != shape:
            host_devices = topologies.get_topology_desc(f"{generation}:{host_shape}", platform="tpu").devices
    except Exception as error:  # libtpu raises many types
        cause = error if importlib.util.find_spec("libtpu") else "the compiler is missing: pip install libtpu"
        raise ValueError(f"--topology {name}: {cause}") from error
    hosts = len(devices) // len(host_devices)
    return Topology(name, devices, host_devices, make_slice(generation, lengths, len(devices), hosts))


def with_rows(config: RunConfig, rows: int, devices: int) -> RunConfig:
    """The config with `rows` rows of a micro-batch per device, or group of devices that shares rows."""
    mesh, training = config.mesh.shape(devices), config.training
    micro_rows = rows * mesh["data"] * mesh["fsdp"]
    if training.minibatch_rows % micro_rows:
        raise ValueError(
            f"--rows {rows} makes micro-batches of {micro_rows} rows, which do not divide training.minibatch_rows "
            f"{training.minibatch_rows}"
        )
    return replace(config, training=replace(training, grad_accum_steps=training.minibatch_rows // micro_rows))


def resident_memory(config: RunConfig, meshes: Meshes) -> ResidentMemory:
    """Computed from shapes, without compiling."""
    model = config.model
    state = update.abstract_state(model, update.make_optimizer(config.training), meshes.train)
    slots = model_runner.abstract_cache(model, config.sampling, meshes.local)
    frozen = config.training.kl_coefficient or model.lora_rank  # with LoRA the base is also the reference
    return ResidentMemory(
        params=_device_bytes(state.params),
        opt_state=_device_bytes(state.opt_state),
        reference=_device_bytes(_compute_params(model, meshes.train)) if frozen else 0,
        sampler_params=_device_bytes(_compute_params(model, meshes.local)),
        slots=_device_bytes(slots),
        offload_reference=config.training.offload_reference and not model.lora_rank,
    )


def training_programs(config: RunConfig, meshes: Meshes) -> Iterator[Program]:
    """The update, and the log-probabilities of the reference or the old policy. Raises DoesNotFitError."""
    mesh, temperature = meshes.train, config.sampling.temperature
    training = with_plan(config.training, learning_rate_plan(config.training, config.rl.steps))
    model, memory = sharding.select_attention(config.model, mesh), resident_memory(config, meshes)
    rows, flops = training.minibatch_rows / mesh.size, row_flops(model, training.seq_len, training.seq_len)
    # Outside jax.set_mesh: optax creates arrays to find out what its state holds, and the devices may not exist.
    state = update.abstract_state(model, update.make_optimizer(training), mesh)
    step = update_program(model, mesh, "grpo", temperature, training)
    logprob_fn = make_logprob_fn(model, training, temperature=temperature)

    def lower(function: Any, *arguments: object) -> Lowered:
        with jax.set_mesh(mesh):
            return function.lower(*arguments)

    weights = _compute_params(model, mesh)
    resolved = _abstract_batch(training, mesh, resolved=True)
    lowered = partial(lower, step, state, resolved, weights if model.lora_rank else None)
    arguments = memory.state + (memory.reference if model.lora_rank else 0)
    yield _compile("update", lowered, memory.training - arguments, rows * training_flops(model, flops))
    if training.kl_coefficient or training.old_logprobs != "sampler":
        # Without a reference they are those of the policy, whose weights are a part of the state.
        frozen = training.kl_coefficient or model.lora_rank
        arguments = memory.reference if frozen else memory.params
        lowered = partial(lower, logprob_fn, weights if frozen else state.params, _abstract_batch(training, mesh))
        other_bytes = memory.state + memory.reference - arguments
        yield _compile("reference", lowered, other_bytes, rows * flops.forward)


def sampling_programs(config: RunConfig, meshes: Meshes) -> Iterator[Program]:
    """The programs of a host's sampler, then the publishing of weights to all samplers. Raises DoesNotFitError."""
    model, sampling, local, memory = config.model, config.sampling, meshes.local, resident_memory(config, meshes)
    for name, tokens, lowered in model_runner.lower_programs(model, sampling, local):
        flops = forward_flops(model, tokens, 0, tokens if name == "decode" else 0).forward / local.size
        arguments = memory.slots if name == "copy_pages" else memory.slots + memory.sampler_params
        trips = sampling.decode_steps_per_call
        yield _compile(name, lambda lowered=lowered: lowered, memory.rollout - arguments, flops, unknown_trips=trips)
    # The sampler has released its old weights and its slots.
    shardings = sharding.per_host_shardings(model, local, tuple(meshes.train.devices.flat))
    weights = sharding.abstract_params(model, meshes.train, model.compute_dtype if model.lora_rank else None)
    lowered = partial(sharding.cast_program(shardings).lower, weights, dtype=model.compute_dtype)
    arguments = 0 if model.lora_rank else memory.params  # LoRA merges a copy
    yield _compile("publish", lowered, memory.training - arguments, 0.0)


def _compile(
    name: str, lower: Callable[[], Lowered], other_bytes: int, flops: float, *, unknown_trips: int = 1
) -> Program:
    """`other_bytes`: what the run keeps allocated meanwhile that is no argument."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="plan-") as folder, _reported(f"compiling {name}"):
        try:
            # Dumped, because `Compiled.as_text` fails for some programs; the dump has no estimated cycles.
            compiled = lower().compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            line = str(error).splitlines()[0]
            reason = line[max(line.rfind("Ran out of"), 0) :]
            raise DoesNotFitError(f"{name}: {re.sub(r'([0-9.]+)G', _gigabytes, reason)}") from error
        (file,) = Path(folder).glob("*after_optimizations.txt")
        text = file.read_text()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        text = compiled.as_text() or text
    work, memory = schedule(text, unknown_trips=unknown_trips), compiled.memory_analysis()
    assert memory is not None, "the compiler for TPUs reports memory"
    return Program(
        name,
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        donated_bytes=memory.alias_size_in_bytes,
        total_bytes=memory.peak_memory_in_bytes + other_bytes,
        flops=flops,
        sent_bytes=sum(work.sent_bytes.values()),
        operations=work.operations,
        cycles=work.cycles,
        compile_seconds=time.monotonic() - start,
    )


def _gigabytes(gibibytes: re.Match[str]) -> str:
    """The compiler's 15.75G in the unit of the plan."""
    return f"{float(gibibytes[1]) * roofline.GIB / 1e9:.2f} GB"


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """Prints a line on stderr every few seconds until the block ends."""
    start, ended = time.monotonic(), threading.Event()

    def report() -> None:
        while not ended.wait(REPORT_SECONDS):
            print(f"{what}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    threading.Thread(target=report, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _compute_params(model: ModelConfig, mesh: Mesh) -> sharding.Params:
    return sharding.abstract_params(model, mesh, model.compute_dtype)


def _abstract_batch(training: TrainingConfig, mesh: Mesh, *, resolved: bool = False) -> PackedBatch:
    """A mini-batch as shapes, types and shardings; `resolved`: with what the update needs besides the packed rows."""

    shape, batch_sharding = (training.minibatch_rows, training.seq_len), sharding.named_sharding(mesh, ("batch", None))
    dtypes: dict[str, Any] = dict(PACKED_DTYPES)
    if resolved and training.kl_coefficient:
        dtypes["ref_logprob_BT"] = np.float32
    if resolved and training.tis_cap:
        dtypes["tis_weight_BT"] = np.float32
    arrays: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding) for name, dtype in dtypes.items()
    }
    return PackedBatch(**arrays)


def _device_bytes(tree: object) -> int:
    """Bytes of the shards on one device."""
    return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))
