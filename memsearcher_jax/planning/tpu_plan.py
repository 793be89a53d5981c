"""What the programs of a run need on a TPU slice: they are compiled for the slice, which need not be present.

Nothing is executed and no weights are allocated. Bytes and FLOPs are those of one device. `candidates` are the meshes,
remat policies, row lengths and rows per device of a slice, ordered by their roofline time.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh
from jax.stages import Lowered

from memsearcher_jax.config import RunConfig
from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.model.flops import forward_flops, row_flops, training_flops
from memsearcher_jax.planning import roofline
from memsearcher_jax.planning.hlo import schedule
from memsearcher_jax.planning.roofline import CHIPS, TpuSlice, Workload, make_slice
from memsearcher_jax.runtime.meshes import Meshes, make_meshes
from memsearcher_jax.sampling import model_runner
from memsearcher_jax.training import update
from memsearcher_jax.training.config import TrainingConfig
from memsearcher_jax.training.logprobs import make_logprob_fn
from memsearcher_jax.training.packing import PACKED_DTYPES, PackedBatch
from memsearcher_jax.training.trainer import update_program

# By activation memory, most first.
REMAT = ("none", "save_qkv_attention_up", "save_qkv_attention", "save_attention", "nothing_saveable")
SIZES = (1, 2, 4)  # of the axes "data" and "tensor", rows per device, and rows' length in longest contexts


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
    other_bytes: int  # allocated by the run while the program runs, but no argument of it
    flops: float  # by formula
    sent_bytes: float  # over links; with one micro-batch
    operations: float  # scheduled: those of loop bodies times trips
    cycles: float | None  # the compiler's estimate, without kernels and collectives; None: unknown
    compile_seconds: float
    compile_cpu_seconds: float  # unlike compile_seconds, independent of the load of the machine

    @property
    def total_bytes(self) -> int:
        """Memory in use at the peak of the program."""
        return self.peak_bytes + self.other_bytes


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
    """The topology with a name such as v5e:4x8. Raises ValueError if the compiler does not know it."""
    generation, _, shape = name.partition(":")
    if generation not in CHIPS:
        raise ValueError(f"--topology {name}: begin it with one of {', '.join(f'{name}:' for name in CHIPS)}")
    if not re.fullmatch(r"\d+(x\d+)*", shape):
        raise ValueError(f"--topology {name}: give the chips along each axis, such as {generation}:4x8")
    lengths = [int(length) for length in shape.split("x")]
    try:
        devices = topologies.get_topology_desc(name, platform="tpu").devices
        # The compiler refuses programs for a subset of a slice, so the devices of a host become a slice of their own.
        coords = [device.coords for device in devices if device.process_index == devices[0].process_index]
        host_shape = "x".join(str(len(set(values))) for values in list(zip(*coords, strict=True))[: len(lengths)])
        host_devices = devices
        if host_shape != shape:
            host_devices = topologies.get_topology_desc(f"{generation}:{host_shape}", platform="tpu").devices
    except Exception as error:  # libtpu raises many types, and may be missing
        raise ValueError(f"--topology {name}: {error}; the compiler is in `pip install libtpu`") from error
    hosts = len(devices) // len(host_devices)
    return Topology(name, devices, host_devices, make_slice(generation, lengths, len(devices), hosts))


def with_rows(config: RunConfig, rows: int, devices: int) -> RunConfig:
    """The config with `rows` rows of a micro-batch per device, or group of devices that shares rows."""
    mesh, training = config.mesh, config.training
    shards = devices // mesh.tensor if -1 in (mesh.data, mesh.fsdp) else mesh.data * mesh.fsdp
    micro_rows = rows * shards
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


def training_programs(config: RunConfig, meshes: Meshes, hlo: Path | None = None) -> Iterator[Program]:
    """The update, and the log-probabilities of the reference and of the old policy. Raises DoesNotFitError.

    The folder `hlo` gets the text of each compiled program.
    """
    mesh, training, temperature = meshes.train, config.training, config.sampling.temperature
    model, memory = sharding.select_attention(config.model, mesh), resident_memory(config, meshes)
    rows, flops = training.minibatch_rows / mesh.size, row_flops(model, training.seq_len, training.seq_len)
    # Outside jax.set_mesh: optax creates arrays to find out what its state holds, and the devices may not exist.
    state = update.abstract_state(model, update.make_optimizer(training), mesh)
    step = update_program(model, mesh, config.rl.method, temperature, training)
    logprob_fn = make_logprob_fn(model, training, temperature=temperature)

    def lower(function: Any, *arguments: object) -> Lowered:
        with jax.set_mesh(mesh):
            return function.lower(*arguments)

    weights = _compute_params(model, mesh)
    lowered = lower(step, state, _abstract_batch(training, mesh, resolved=True), weights if model.lora_rank else None)
    arguments = memory.state + (memory.reference if model.lora_rank else 0)
    yield _compile("update", lowered, memory.training - arguments, rows * training_flops(model, flops), hlo)
    batch = _abstract_batch(training, mesh)
    if training.kl_coefficient:
        lowered = lower(logprob_fn, weights, batch)
        yield _compile("reference", lowered, memory.state, rows * flops.forward, hlo)
    if training.old_logprobs != "sampler":
        lowered = lower(logprob_fn, weights if model.lora_rank else state.params, batch)
        arguments = 0 if model.lora_rank else memory.params  # LoRA merges a copy
        yield _compile("old log-probabilities", lowered, memory.training - arguments, rows * flops.forward, hlo)


def sampling_programs(config: RunConfig, meshes: Meshes, hlo: Path | None = None) -> Iterator[Program]:
    """The programs of a host's sampler, then the publishing of weights to all samplers. Raises DoesNotFitError.

    The folder `hlo` gets the text of each compiled program.
    """
    model, sampling, local, memory = config.model, config.sampling, meshes.local, resident_memory(config, meshes)
    for name, tokens, lowered in model_runner.lower_programs(model, sampling, local):
        flops = forward_flops(model, tokens, 0, tokens if name == "decode" else 0).forward / local.size
        arguments = memory.slots if name == "copy_pages" else memory.slots + memory.sampler_params
        trips = sampling.decode_steps_per_call
        yield _compile(name, lowered, memory.rollout - arguments, flops, hlo, unknown_trips=trips)
    # The sampler has released its old weights and its slots.
    shardings = sharding.per_host_shardings(model, local, tuple(meshes.train.devices.flat))
    weights = sharding.abstract_params(model, meshes.train, model.compute_dtype if model.lora_rank else None)
    lowered = sharding.cast_program(shardings).lower(weights, dtype=model.compute_dtype)
    arguments = 0 if model.lora_rank else memory.params  # LoRA merges a copy
    yield _compile("publish", lowered, memory.training - arguments, 0.0, hlo)


def _compile(
    name: str, lowered: Lowered, other_bytes: int, flops: float, hlo: Path | None, *, unknown_trips: int = 1
) -> Program:
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        start, cpu_start = time.perf_counter(), time.process_time()
        try:
            # Dumped, because `Compiled.as_text` fails for some programs; the dump has no estimated cycles.
            compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            line = str(error).splitlines()[0]
            raise DoesNotFitError(f"{name}: {line[max(line.rfind('Ran out of'), 0) :]}") from error
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        (file,) = Path(folder).glob("*after_optimizations.txt")
        text = file.read_text()
    try:
        text, has_cycles = compiled.as_text() or text, True
    except jax.errors.JaxRuntimeError:
        has_cycles = False
    work = schedule(text, unknown_trips=unknown_trips)
    if hlo:
        hlo.mkdir(parents=True, exist_ok=True)
        (hlo / f"{name.replace(', ', '_').replace(' ', '_')}.txt").write_text(text)
    memory: Any = compiled.memory_analysis()
    return Program(
        name,
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        donated_bytes=memory.alias_size_in_bytes,
        other_bytes=other_bytes,
        flops=flops,
        sent_bytes=sum(work.sent_bytes.values()),
        operations=work.operations,
        cycles=work.cycles if has_cycles else None,
        compile_seconds=seconds,
        compile_cpu_seconds=cpu_seconds,
    )


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


@dataclass(frozen=True)
class Candidate:
    """One way to train on a slice."""

    mesh: MeshConfig
    remat: str
    seq_len: int
    rows: int  # of a micro-batch, per device or group of "tensor" devices
    seconds: float  # of reference and update per step, at the roofline

    def apply(self, config: RunConfig) -> RunConfig:
        """The config with the settings of this candidate."""
        training = replace(config.training, seq_len=self.seq_len)
        config = replace(config, mesh=self.mesh, model=replace(config.model, remat=self.remat), training=training)
        return with_rows(config, self.rows, self.mesh.data * self.mesh.fsdp * self.mesh.tensor)

    def needs_more_memory_than(self, other: Candidate) -> bool:
        """Whether it certainly needs at least as much: the same mesh, as many tokens, and as much saved for each."""
        return (
            self.mesh == other.mesh
            and self.rows * self.seq_len >= other.rows * other.seq_len
            and REMAT.index(self.remat) <= REMAT.index(other.remat)
        )

    def __str__(self) -> str:
        mesh = self.mesh
        rows = f"{self.rows} rows of {self.seq_len:,} tokens per device"
        return f"mesh {mesh.data} x {mesh.fsdp} x {mesh.tensor}, remat {self.remat}, {rows}"


def candidates(config: RunConfig, workload: Workload, tpu_slice: TpuSlice) -> list[Candidate]:
    """All valid candidates, fastest first; of equally fast ones, the one with the lowest memory first."""
    found = []
    for mesh in _meshes(config, tpu_slice.devices):
        for rows, longest, remat in itertools.product(SIZES, SIZES, REMAT):
            seq_len = longest * config.sampling.context_tokens  # a row holds any context
            if config.training.minibatch_rows % (mesh.data * mesh.fsdp * rows) or seq_len % config.training.logit_chunk:
                continue
            candidate = Candidate(mesh, remat, seq_len, rows, 0.0)
            seconds = _seconds(candidate.apply(config), workload, tpu_slice)
            found.append(replace(candidate, seconds=seconds))
    return sorted(found, key=lambda c: (round(c.seconds, 3), c.rows * c.seq_len, -REMAT.index(c.remat), c.mesh.data))


def min_row_bytes(config: RunConfig) -> float:
    """A lower bound of the bytes saved per row for the backward pass: each layer's input, and what the policy names."""
    model, saved = config.model, REMAT[::-1].index(config.model.remat)
    heads, kv = model.heads * model.head_size, 2 * model.kv_heads * model.head_size
    # Split over the axis "tensor". "none" saves all four arrays of the feed-forward block.
    split = sum((heads, heads + kv, model.ffn_size, 3 * model.ffn_size)[:saved])
    inputs = model.compute_itemsize * model.layers * config.training.seq_len
    return inputs * (model.embed_size + split / config.mesh.tensor)


def _meshes(config: RunConfig, devices: int) -> Iterator[MeshConfig]:
    for data, tensor in itertools.product(SIZES, SIZES):
        if devices % (data * tensor):
            continue
        mesh = MeshConfig(data, devices // (data * tensor), tensor)
        with contextlib.suppress(ValueError):
            sharding.check_divides(config.model, vars(mesh))
            yield mesh


def _seconds(config: RunConfig, workload: Workload, tpu_slice: TpuSlice) -> float:
    """The roofline time of the training phases, with collective bytes by formula."""
    model, mesh, training = config.model, config.mesh, config.training
    param_bytes = roofline.matmul_param_bytes(model) / mesh.tensor
    all_gather = param_bytes * (mesh.fsdp - 1) / mesh.fsdp
    # Gathered forward, and again for recomputation; gradients are scattered.
    passes = 2 if model.remat == "none" else 3
    forwards = bool(training.kl_coefficient) + (training.old_logprobs != "sampler")
    sent_bytes = {"update": passes * all_gather, "reference": forwards * all_gather}
    if mesh.data > 1 and not model.lora_rank:
        sent_bytes["update"] += 2 * 2 * param_bytes / mesh.fsdp
    phases = roofline.training_phases(
        config, workload, tpu_slice, tensor=mesh.tensor, data=mesh.data, sent_bytes=sent_bytes
    )
    # Tensor parallelism: two all-reduces of activations per layer and pass. Unlike gathers, which run ahead, they wait
    # for a product, and the next product waits for them.
    rows = training.minibatch_rows // training.grad_accum_steps // (mesh.data * mesh.fsdp)
    layer_inputs = min_row_bytes(replace(config, model=replace(model, remat="nothing_saveable"))) * rows
    all_reduce = 2 * 2 * (mesh.tensor - 1) / mesh.tensor * layer_inputs
    passes += forwards
    waiting = passes * all_reduce * roofline.microbatches_per_step(config, workload)
    return math.fsum(phase.seconds for phase in phases) + tpu_slice.phase("", 0, 0, waiting).links
