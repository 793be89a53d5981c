"""What the programs of a run need on a TPU slice: they are compiled for the slice, which need not be present.

Nothing is executed and no weights are allocated. Bytes are those of one device.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh
from jax.stages import Lowered

from memsearcher_jax.config import RunConfig
from memsearcher_jax.hosts.meshes import Meshes
from memsearcher_jax.model import lora, qwen, sharding
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.ops.kernel_errors import is_of_kernel, way_around_kernels
from memsearcher_jax.planning.hlo import Work, count_work
from memsearcher_jax.planning.roofline import CHIPS, GIB, GPUS, Topology, scoring_passes
from memsearcher_jax.runs.load_weights import teacher_model
from memsearcher_jax.sampling import model_runner
from memsearcher_jax.training import update
from memsearcher_jax.training.config import TrainingConfig, learning_rate_plan, with_plan
from memsearcher_jax.training.logprobs import make_logprob_fn
from memsearcher_jax.training.packing import PACKED_DTYPES, PackedBatch
from memsearcher_jax.training.trainer import merge_program, update_program

HOST_CHIPS = {"1x1": (1, 1, 1), "1x1x1": (1, 1, 1), "2x4": (2, 4, 1)}  # along each axis; other hosts have 2 x 2
COMPILER_OPTIONS = {"v4": {"chip_config_name": "megacore"}}  # by default a chip would be two devices
MESSAGE_CHARACTERS = 300  # of the compiler
Notify = Callable[[str], object]  # gets the program that begins to compile


class DoesNotFitError(Exception):
    """A program exceeds the memory of a device. The message is one line."""

    def __init__(self, reason: str, needed_bytes: float):
        """`needed_bytes`: at least so many of a device."""
        super().__init__(reason)
        self.needed_bytes = needed_bytes


class CompilerError(RuntimeError):
    """The compiler failed for another reason than memory or a kernel. The message is one line."""


@dataclass(frozen=True)
class Program:
    """A compiled program. Bytes are of one device and one call."""

    name: str
    phase: str
    peak_bytes: int  # arguments, results and temporaries at the peak
    total_bytes: int  # at the peak, with what the run keeps allocated that is no argument
    work: Work | None  # of one micro-batch, or of one call; None: the compiler does not write the program as text


@dataclass(frozen=True)
class ResidentMemory:
    """What a run keeps allocated on each device between programs, in bytes."""

    state: int  # weights, and what the optimizer keeps; always there
    base: int  # LoRA: the frozen weights, always there
    reference: int  # or the teacher: always there, or only while it is used (`training.offload_reference`)
    training: int  # while the state is updated or published
    gradients: int  # during an update: the sum over its micro-batches
    sampler_params: int  # during rollouts
    slots: int  # during rollouts: the sampler's KV cache and state
    rollout: int  # while contexts are sampled


def find_topology(name: str, slices: int = 1) -> Topology:
    """The topology of equal slices with a name such as v5e:4x8, or of GPUs, h100:8 or h100:2x8.

    Those of GPUs have as many devices of the CPU, for which nothing is compiled. Raises ValueError, in one line, for
    another name, and for several slices of GPUs or of chips whose network is not known.
    """
    generation, _, shape = name.partition(":")
    form = r"([1-9]\d{0,2}x)?[1-8]" if generation in GPUS else r"\d+(x\d+)*(-4t)?"
    if generation not in CHIPS | GPUS or not re.fullmatch(form, shape):
        raise ValueError(f"--topology {name}: plans are for {', '.join(CHIPS)} and {', '.join(GPUS)}:[HOSTSx]GPUS")
    chips = shape.removesuffix("-4t")
    lengths = [int(length) for length in chips.split("x")]
    if generation in GPUS:
        if slices > 1:
            raise ValueError(f"--slices {slices} is for TPUs: several hosts of GPUs are {generation}:HOSTSxGPUS")
        jax.config.update("jax_num_cpu_devices", math.prod(lengths))
        devices = jax.devices("cpu")
        return Topology.of(generation, lengths, devices, devices[: lengths[-1]])
    if slices > 1 and CHIPS[generation].network_bandwidth is None:
        raise ValueError(f"--slices {slices}: the rate of the network between slices of {generation} is not known")
    # The compiler refuses programs for a subset of a slice, so the devices of a host become a slice of their own.
    bounds = HOST_CHIPS.get(shape, (2, 2, 1))
    host_shape = "x".join(map(str, bounds[: len(lengths)]))
    options = {"chips_per_host_bounds": bounds, **COMPILER_OPTIONS.get(generation, {})}
    devices = topologies.get_topology_desc(f"{generation}:{chips}", "tpu", num_slices=slices, **options).devices
    host = topologies.get_topology_desc(f"{generation}:{host_shape}", "tpu", **options)
    topology = Topology.of(generation, lengths, devices, host.devices, slices)
    return replace(topology, name=name)  # which may say how many chips a host has


def resident_memory(config: RunConfig, meshes: Meshes, *, trains: bool = True) -> ResidentMemory:
    """Computed from shapes, without compiling. `trains`: whether the devices also train what they sample from."""
    model = config.model
    sampler_params = _device_bytes(model_runner.abstract_params(model, config.sampling, meshes.local))
    slots = _device_bytes(model_runner.abstract_cache(model, config.sampling, meshes.local))
    if not trains:
        return ResidentMemory(0, 0, 0, 0, 0, sampler_params, slots, rollout=sampler_params + slots)
    trained = update.abstract_state(model, update.make_optimizer(config.training), meshes.train)
    state = _device_bytes(trained.params) + _device_bytes(trained.opt_state)
    base = _device_bytes(_compute_params(model, meshes.train)) if model.lora_rank else 0
    # With LoRA the base is the reference, too.
    is_kept = config.teacher.path or (config.training.kl_coefficient and not base)
    scored_by = teacher_model(config) if config.teacher.path else model
    reference = _device_bytes(_compute_params(scored_by, meshes.train)) if is_kept else 0
    training = state + base + (0 if config.training.offload_reference else reference)
    return ResidentMemory(
        state=state,
        base=base,
        reference=reference,
        training=training,
        gradients=_device_bytes(trained.params) if config.training.grad_accum_steps > 1 else 0,
        sampler_params=sampler_params,
        slots=slots,
        rollout=training + sampler_params + slots,
    )


class _Call(NamedTuple):
    """A program that is compiled, its arguments, and the bytes that the run keeps allocated besides these."""

    name: str
    program: Any
    arguments: tuple
    others: int


def training_programs(config: RunConfig, meshes: Meshes, notify: Notify) -> Iterator[Program]:
    """The update, and the log-probabilities of reference, old policy and teacher. Raises DoesNotFitError."""
    mesh = meshes.train
    memory = resident_memory(config, meshes)
    temperature = config.sampling.temperature
    training = with_plan(config.training, learning_rate_plan(config.training, config.rl.steps))
    model = sharding.select_attention(config.model, mesh, training.seq_len)
    # Outside jax.set_mesh: optax creates arrays to find out what its state holds, and the devices may not exist.
    state = update.abstract_state(model, update.make_optimizer(training), mesh)
    weights = _compute_params(model, mesh)

    batch = _abstract_batch(training, mesh, resolved=True)
    step = update_program(model, mesh, "grpo", temperature, training)
    base = weights if model.lora_rank else None
    calls = [_Call("update", step, (state, batch, base), memory.training - memory.state - memory.base)]

    passes = scoring_passes(config)
    rows = _abstract_batch(training, mesh)
    kept = memory.state + memory.base + memory.reference
    if "reference" in passes:
        program = make_logprob_fn(model, training, temperature=temperature)
        scores_policy = not training.kl_coefficient or bool(config.teacher.path)
        params = state.params if scores_policy and not model.lora_rank else weights
        merges_copy = scores_policy and model.lora_rank  # of the policy
        own = 0 if merges_copy else _device_bytes(params)
        calls.append(_Call("reference", program, (params, rows), kept - own))
    if "teacher" in passes:
        teacher = sharding.select_attention(teacher_model(config), mesh, training.seq_len)
        program = make_logprob_fn(teacher, training, temperature=temperature, top_k=config.teacher.top_k)
        calls.append(_Call("teacher", program, (_compute_params(teacher, mesh), rows), kept - memory.reference))

    for call in calls:
        notify(f"compiling {call.name}")
        with jax.set_mesh(mesh), way_around_kernels("model.attention"):
            lowered = call.program.lower(*call.arguments)
        yield _compile(call.name, lowered, call.others, "model.attention")


def sampling_programs(config: RunConfig, meshes: Meshes, notify: Notify, *, trains: bool = True) -> Iterator[Program]:
    """The programs of a host's sampler, then, if the run trains, the publishing of weights to all samplers.

    Raises DoesNotFitError.
    """
    model = config.model
    sampling = config.sampling
    local = meshes.local
    memory = resident_memory(config, meshes, trains=trains)
    for name, lowered in model_runner.lower_programs(model, sampling, local):
        own = memory.slots if name == "copy_pages" else memory.slots + memory.sampler_params
        notify(f"compiling {name.partition(',')[0]}")
        yield _compile(
            name, lowered, memory.rollout - own, "sampling.attention", "rollout", sampling.decode_steps_per_call
        )
    if not trains:
        return
    # The sampler has released its old weights and its slots.
    notify("compiling publish")
    devices = tuple(meshes.train.devices.flat)
    dtype = sampling.weights_dtype(model.compute_dtype)
    weights = sharding.abstract_params(model, meshes.train, model.compute_dtype if model.lora_rank else None)
    if model.lora_rank and sharding.is_in_sampler_form(weights, model, local, devices, dtype):
        # The sampler reads what the adapters are merged into.
        adapters = sharding.abstract_arrays(lora.adapter_specs(model), meshes.train)
        lowered = merge_program(model, meshes.train).lower(weights, adapters)
        own = _device_bytes((weights, adapters))
    else:
        lowered = sharding.publish_program(model, local, devices, dtype).lower(weights)
        own = 0 if model.lora_rank else _device_bytes(weights)  # LoRA merges a copy
    yield _compile("publish", lowered, memory.training - own, "model.attention")


def _compile(
    name: str, lowered: Lowered, others: int, attention: str, phase: str = "", unknown_trips: int = 1
) -> Program:
    """Compiles a program.

    `others`: bytes that the run keeps allocated meanwhile, besides the arguments. `attention`: the setting that chooses
    its kernels. `phase`: by default the name. Raises DoesNotFitError, KernelError and CompilerError.
    """
    with way_around_kernels(attention):
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            first_line = str(error).splitlines()[0]  # the others list what is allocated, kernels among it
            if "RESOURCE_EXHAUSTED" in first_line and "vmem" not in first_line:
                raise _does_not_fit(name, first_line) from error
            if is_of_kernel(error):
                raise
            raise CompilerError(
                f"the TPU compiler failed on the program {name!r}: try another mesh.tensor, sampling.tensor or "
                f"model.remat ({first_line[:MESSAGE_CHARACTERS]})"
            ) from error
    text = None
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # not every compiler writes every program as text
        text = compiled.as_text()
    work = count_work(text, unknown_trips=unknown_trips) if text else None
    memory = compiled.memory_analysis()
    assert memory is not None, "the compiler for TPUs reports memory"
    peak = memory.peak_memory_in_bytes
    return Program(name, phase or name, peak, peak + others, work)


def _does_not_fit(name: str, line: str) -> DoesNotFitError:
    """The compiler's line about a device's memory in the unit of the plan; it writes GiB as G."""
    reason = line[max(line.rfind("Ran out of"), 0) :]
    reason = re.sub(r"([0-9.]+)G", lambda size: f"{float(size[1]) * GIB / 1e9:.2f} GB", reason)
    sizes = [float(size) * GIB for size in re.findall(r"([0-9.]+)G", line)]
    return DoesNotFitError(f"{name}: {reason}", max(sizes, default=0.0))  # the other size is the limit


def count_weights(model: ModelConfig) -> int:
    """The numbers of a model."""
    return sum(math.prod(weight.shape) for weight in jax.tree.leaves(qwen.param_specs(model)))


def _compute_params(model: ModelConfig, mesh: Mesh) -> sharding.Params:
    return sharding.abstract_params(model, mesh, model.compute_dtype)


def _abstract_batch(training: TrainingConfig, mesh: Mesh, *, resolved: bool = False) -> PackedBatch:
    """A mini-batch as shapes, types and shardings; `resolved`: with what the update needs besides the packed rows."""
    dtypes: dict[str, Any] = dict(PACKED_DTYPES)
    if resolved and (training.kl_coefficient or training.objective != "grpo"):
        dtypes["ref_logprob_BT"] = np.float32
    if resolved and training.tis_cap:
        dtypes["tis_weight_BT"] = np.float32
    shape = (training.minibatch_rows, training.seq_len)
    rows = sharding.named_sharding(mesh, ("batch", None))
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=rows) for name, dtype in dtypes.items()}
    return PackedBatch(**arrays)  # type: ignore[arg-type]


def _device_bytes(tree: object) -> int:
    """Bytes of the shards on one device."""
    return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))
