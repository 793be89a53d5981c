"""Lower bounds of the time of a step.

The limits are FLOPs, memory traffic and link traffic over the peak rates of the chips, and the compiler's estimate of
its cycles over their clock.

The times are limits, not predictions: every chip runs at its peak rate and never waits. Links carry weights and
gradients; exchanges of activations along the axis "tensor" are left out. The largest of the four limits bounds a phase
(`Phase.bound`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from memsearcher_jax.config import RunConfig, agent_of
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.planning.flops import forward_flops, training_flops
from memsearcher_jax.planning.hlo import Work
from memsearcher_jax.ranges import NonNegative, Positive, PositiveFraction

GIB = 2**30
ATTENTION_BLOCK = 1_024  # keys that the attention kernel reads at once


@dataclass(frozen=True)
class Chip:
    """A JAX device: a TPU chip, half of one if `devices` is 2, or a GPU."""

    flops: float  # bfloat16 FLOPs per second
    clock: float  # cycles per second
    hbm_bytes: float  # available to programs, as enforced by the compiler
    hbm_bandwidth: float  # bytes per second
    ici_bandwidth: float  # bytes per second sent over all links, if they form rings
    ring_chips: int  # minimum chips along an axis for its links to form a ring
    devices: int = 1  # JAX devices per chip
    network_bandwidth: float | None = None  # bytes per second to other slices; None: not known


# Rates: docs.cloud.google.com/tpu/docs, and jax-ml/scaling-book, tpus.md. hbm_bytes: error messages of the compiler.
# clock: the FLOPs over those of the matrix units per cycle, where a core of tpu7x has the units of one of v6e.
# network_bandwidth: the same pages; 6.4 Tb/s for the 256 chips of a pod of v5e, 50 or 100 Gb/s for another chip.
CHIPS = {
    "v4": Chip(275e12, 1.05e9, 30.75 * GIB, 1_228e9, 300e9, 4),
    "v5e": Chip(197e12, 1.5e9, 15.75 * GIB, 819e9, 200e9, 16, network_bandwidth=6.4e12 / 8 / 256),
    "v5p": Chip(459e12, 1.75e9, 95.73 * GIB, 2_765e9, 600e9, 4, network_bandwidth=50e9 / 8),
    "v6e": Chip(918e12, 1.75e9, 31.24 * GIB, 1_640e9, 400e9, 16, network_bandwidth=100e9 / 8),
    "tpu7x": Chip(1_153e12, 2.2e9, 94.74 * GIB, 3_690e9, 300e9, 4, devices=2, network_bandwidth=100e9 / 8 / 2),
}
# SXM cards: dense bfloat16, HBM3 and HBM3e, NVLink in one direction, of nvidia.com/en-us/data-center/h100 and h200;
# clock: of the boost. hbm_bytes: what nvidia-smi shows, of which `Topology.of` takes the share that JAX takes.
GPUS = {
    "h100": Chip(989e12, 1.98e9, 79.65 * GIB, 3_350e9, 450e9, 1),
    "h200": Chip(989e12, 1.98e9, 140.4 * GIB, 4_800e9, 450e9, 1),
}
DEVICE_KINDS = {
    "v4": "v4",
    "v5 lite": "v5e",
    "v5e": "v5e",
    "v5p": "v5p",
    "v5": "v5p",
    "v6 lite": "v6e",
    "v6e": "v6e",
    "tpu7x": "tpu7x",
    **{name: name for name in GPUS},
}
"""What `device_kind` of JAX contains, the most particular first -> the generation."""
NETWORK_BANDWIDTH = 50e9  # bytes per second of a GPU to other hosts, over InfiniBand of 400 Gb/s


@dataclass(frozen=True)
class Workload:
    """The assumed means of a step. Defaults: the lengths of benchmarks/workload.py, see `of_run`."""

    contexts: Positive = 3.5
    """Contexts per trajectory."""
    context_tokens: Positive = 1_340.0
    """Tokens per context."""
    generated_tokens: Positive = 250.0
    """Tokens per context that are generated and trained."""
    shared_tokens: NonNegative = 465.0
    """Tokens with which the contexts of a packed row begin, and which it holds once: 448 that all share, 480 or more in
    rows of one problem."""
    longest_tokens: NonNegative = 2_310.0
    """Tokens that the longest trajectory of a step generates, one after the other. Default: the longest of 1,280."""
    prefilled_tokens: NonNegative = 640.0
    """Tokens per context that are prefilled, without cached prefixes."""
    packing_efficiency: PositiveFraction = 0.995
    """Share of a packed row that holds tokens."""
    host_ms: NonNegative = 10.0
    """CPU milliseconds of the host per trajectory while it is rolled out, as benchmarks/host.py measures them."""
    between_ms: NonNegative = 1.0
    """The same after the rollout, for the trajectories of one host: rewards and advantages (--between)."""
    packing_ms: NonNegative = 0.5
    """The same before the update, for the trajectories of all hosts: exchange and packing (--between)."""
    passages: NonNegative = 21_015_324.0
    """Passages of the index that each host searches. Default: those of the 2018 Wikipedia for the preset of a published
    model, 0 for others and where retrieval.url names a service."""
    efficiency: PositiveFraction = 0.45
    """Share of the roofline that a run reaches."""

    def of_run(self, config: RunConfig) -> Workload:
        """With the defaults as the run's contexts can be: a shorter one has as much less of each kind of token."""
        likely = ONE_CONTEXT if agent_of(config).has_one_context else Workload()
        share = min(config.sampling.context_tokens / likely.context_tokens, 1.0)
        values = asdict(likely)
        for name in values:
            if name.endswith("_tokens"):
                values[name] *= share
        if not config.published_model or config.retrieval.url or not agent_of(config).searches:
            values["passages"] = 0.0
        for name, value in asdict(self).items():
            if value != getattr(Workload, name):
                values[name] = value
        return Workload(**values)


ONE_CONTEXT = Workload(
    contexts=1.0,
    context_tokens=2_310.0,
    generated_tokens=315.0,
    shared_tokens=465.0,
    longest_tokens=775.0,
    prefilled_tokens=1_550.0,
)
"""The same turns in one context, which has no memories."""


@dataclass(frozen=True)
class Phase:
    """A phase of a step: the seconds of each limit."""

    name: str
    compute: float = 0.0
    memory: float = 0.0
    links: float = 0.0
    operations: float | None = None  # the compiler's estimate of the cycles of its operations; None: unknown
    host: float = 0.0  # in which the devices wait for the host

    @property
    def limits(self) -> dict[str, float]:
        """The known limits by name."""
        seconds = asdict(self)
        del seconds["name"]
        return {name: limit for name, limit in seconds.items() if limit is not None}

    @property
    def seconds(self) -> float:
        return max(self.limits.values())

    @property
    def bound(self) -> str:
        """The largest limit."""
        limits = self.limits
        return max(limits, key=lambda name: limits[name])


@dataclass(frozen=True)
class Topology:
    """The devices of a run, which need not be present."""

    name: str  # of a slice, such as v5e:4x8
    generation: str  # in CHIPS or GPUS
    chip: Chip
    devices: Sequence[Any]  # of JAX
    host_devices: Sequence[Any]  # of one host
    link_bandwidth: float  # bytes per second that a device sends to others, of its slice
    slices: int = 1

    @classmethod
    def of(
        cls,
        generation: str,
        shape: Sequence[int],
        devices: Sequence[Any],
        host_devices: Sequence[Any],
        slices: int = 1,
    ) -> Topology:
        """Equal slices of a generation in `CHIPS`, or cards in `GPUS`; `shape`: chips of a slice along each axis."""
        chip = (CHIPS | GPUS)[generation]
        bandwidth = chip.ici_bandwidth * (1 if all(length >= chip.ring_chips for length in shape) else 0.5)
        if generation in GPUS:
            old = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")  # which JAX still reads
            chip = replace(chip, hbm_bytes=chip.hbm_bytes * float(os.environ.get("XLA_CLIENT_MEM_FRACTION", old)))
            bandwidth = bandwidth if len(devices) == len(host_devices) else NETWORK_BANDWIDTH
        name = f"{generation}:{'x'.join(map(str, shape))}"
        return cls(name, generation, chip, devices, host_devices, bandwidth, slices)

    @property
    def network_bandwidth(self) -> float:
        """Bytes per second that a device sends to other slices."""
        assert self.chip.network_bandwidth, "find_topology refuses several slices of other chips"
        return self.chip.network_bandwidth

    @property
    def hosts(self) -> int:
        return len(self.devices) // len(self.host_devices)

    @property
    def host_chips(self) -> int:
        return len(self.host_devices) // self.chip.devices

    @property
    def chips(self) -> int:
        return len(self.devices) // self.chip.devices

    def phase(self, name: str, flops: float, hbm_bytes: float, sent_bytes: float, cycles: float | None = None) -> Phase:
        """A phase in which each device does this much."""
        return Phase(
            name,
            compute=flops / self.chip.flops,
            memory=hbm_bytes / self.chip.hbm_bandwidth,
            links=sent_bytes / self.link_bandwidth,
            operations=None if cycles is None else cycles / self.chip.clock,
        )


def generation_of(device_kind: str) -> str | None:
    """The generation, in `CHIPS` or `GPUS`, of a device as JAX names it; None for one that is not known."""
    kind = device_kind.lower()
    return next((name for part, name in DEVICE_KINDS.items() if part in kind), None)


def matmul_param_bytes(model: ModelConfig) -> float:
    """Bytes, in compute_dtype, of all weight matrices that multiply activations."""
    return forward_flops(model, 1, 0, 1).forward / 2 * model.compute_itemsize


def contexts_per_row(config: RunConfig, workload: Workload) -> float:
    """Contexts that are packed into a row, which holds the tokens that they share once."""
    own_tokens = config.training.seq_len * workload.packing_efficiency - workload.shared_tokens
    return max(own_tokens / (workload.context_tokens - workload.shared_tokens), 1.0)


def contexts_per_step(config: RunConfig, workload: Workload) -> float:
    return config.rl.prompts_per_step * config.rl.group_size * workload.contexts


def rows_per_step(config: RunConfig, workload: Workload) -> float:
    return contexts_per_step(config, workload) / contexts_per_row(config, workload)


def updates_per_step(config: RunConfig, workload: Workload) -> int:
    """Optimiser steps of a training step."""
    from memsearcher_jax.training.rows import Layout  # it loads JAX, which reads its environment then

    training = config.training
    layout = Layout.of(
        math.ceil(rows_per_step(config, workload)),
        contexts_per_step(config, workload),
        minibatch_rows=training.minibatch_rows,
        microbatches=training.grad_accum_steps,
        minibatch_contexts=training.minibatch_contexts,
    )
    return layout.minibatches


def scoring_passes(config: RunConfig) -> dict[str, int]:
    """Forward passes over each row before the update: of the reference, or the policy before it, and of the teacher."""
    passes = {}
    of_reference = bool(config.training.kl_coefficient) and not config.teacher.path
    of_old_policy = config.training.old_logprobs == "trainer"
    if of_reference or of_old_policy:
        passes["reference"] = of_reference + of_old_policy
    if config.teacher.path:
        passes["teacher"] = 1
    return passes


def training_phases(config: RunConfig, workload: Workload, topology: Topology) -> list[Phase]:
    """The phases after the rollout."""
    from memsearcher_jax.runs.load_weights import teacher_model  # it loads JAX, which reads its environment then

    training = config.training
    micro_rows = training.minibatch_rows // training.grad_accum_steps
    count = math.ceil(rows_per_step(config, workload) / micro_rows)  # micro-batches that hold tokens
    device_rows = micro_rows * count / len(topology.devices)  # fractional if "tensor" splits rows
    # Logits are computed of the trained tokens, in whole chunks.
    chunks = math.ceil(contexts_per_row(config, workload) * workload.generated_tokens / training.logit_chunk)
    # A query needs the keys of its own context and those that all share, in whole blocks.
    keys = min(workload.context_tokens + ATTENTION_BLOCK, training.seq_len / 2)

    mesh = config.mesh.shape(len(topology.devices))
    phases = []
    for name, calls in (scoring_passes(config) | {"update": 1}).items():
        model = teacher_model(config) if name == "teacher" else config.model
        row = forward_flops(model, training.seq_len, training.seq_len * keys, chunks * training.logit_chunk)
        if name == "update":
            passes = 3  # it gathers the matrices twice, and scatters their gradients
            row_flops = training_flops(model, row)
        else:
            passes = calls
            row_flops = calls * row.forward
        # From the devices that share them. A device writes and reads all, or its share along "tensor".
        gathered = passes * count * matmul_param_bytes(model) / mesh["tensor"]
        sent = gathered * (mesh["fsdp"] - 1) / mesh["fsdp"]
        phases.append(topology.phase(name, device_rows * row_flops, 2 * gathered, sent))
    if topology.slices > 1:
        phases.append(Phase("gradients between slices", links=gradient_exchange_seconds(config, workload, topology)))
    return phases


def gradient_exchange_seconds(config: RunConfig, workload: Workload, topology: Topology) -> float:
    """Seconds of a step in which slices exchange the sums of their gradients, once for each update.

    A ring over S slices sends 2 (S - 1) / S of a device's gradient, which has the type of the weights. Those of
    adapters are a thousandth of it and left out.
    """
    if config.model.lora_rank:
        return 0.0
    mesh = config.mesh.shape(len(topology.devices))
    weights = matmul_param_bytes(config.model) / config.model.compute_itemsize
    itemsize = 2 if config.model.param_dtype == "bfloat16" else 4
    gradient_bytes = weights * itemsize / (mesh["fsdp"] * mesh["tensor"])
    sent = 2 * (topology.slices - 1) / topology.slices * gradient_bytes
    return updates_per_step(config, workload) * sent / topology.network_bandwidth


def sampling_phases(config: RunConfig, workload: Workload, topology: Topology, work: Mapping[str, Work]) -> list[Phase]:
    """Publishing the weights, and the rollouts. `work`: of compiled programs, per call, where it is known.

    Without `rl.carry_over` a trajectory decodes one context at a time, so no more slots are active than trajectories
    run; steps that only the longest of them needs are the phase "longest trajectory".
    """
    model = config.model
    sampling = config.sampling
    rl = config.rl
    host_devices = len(topology.host_devices)
    trajectories = rl.prompts_per_step * rl.group_size / topology.hosts
    contexts = trajectories * workload.contexts
    tokens = contexts * workload.generated_tokens
    steps = tokens / (sampling.slots if rl.carry_over else min(sampling.slots, trajectories))
    extra_steps = 0 if rl.carry_over else max(workload.longest_tokens - steps, 0)
    param_bytes = matmul_param_bytes(model) / sampling.tensor
    if sampling.weights == "int8":  # without the output layer
        param_bytes -= forward_flops(model, 1, 0, 0).forward / 2 * (model.compute_itemsize - 1) / sampling.tensor
    prefilled = contexts * workload.prefilled_tokens
    prefill_flops = forward_flops(model, prefilled, prefilled * workload.context_tokens / 2, 0).forward
    prefill_calls = prefilled / (sampling.prefill_buckets[-1] * (host_devices // sampling.tensor))
    cached_tokens = workload.context_tokens * 0.75  # of a context, on average while it decodes
    read_entries = cached_tokens + sampling.page_tokens / 2  # whole pages
    kv_bytes = sampling.kv_bytes(model.head_size, model.compute_itemsize)
    cache_bytes = model.layers * model.kv_heads * kv_bytes * read_entries
    decode_flops = tokens * forward_flops(model, 1, cached_tokens, 1).forward

    def phase(program: str, calls: float, flops: float, hbm_bytes: float, name: str = "") -> Phase:
        cycles = calls * work[program].cycles if program in work else None
        return topology.phase(name or program, flops / host_devices, hbm_bytes, 0.0, cycles)

    decode_bytes = steps * param_bytes + tokens * cache_bytes / host_devices
    phases = [
        topology.phase("publish", 0.0, 2 * param_bytes, param_bytes),
        phase("prefill", prefill_calls, prefill_flops, prefill_calls * param_bytes),
        phase("decode", steps / sampling.decode_steps_per_call, decode_flops, decode_bytes),
    ]
    if extra_steps:
        calls = extra_steps / sampling.decode_steps_per_call
        phases.append(phase("decode", calls, 0, extra_steps * param_bytes, "longest trajectory"))
    return phases
