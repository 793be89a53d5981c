"""The settings that `--suggest` tries on a slice: those of training, then those of the sampler. See `SETTINGS`.

Training: remat policy, length of rows, rows per device, tensor parallelism. The sampler: devices that share a copy of
the weights, slots, room of the KV cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memsearcher_jax.config import RunConfig, differences, settings
from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import REMAT, MeshConfig
from memsearcher_jax.planning import roofline
from memsearcher_jax.planning.roofline import Topology, Workload
from memsearcher_jax.sampling.config import SamplingConfig

SETTINGS = (
    *("mesh.data", "mesh.fsdp", "mesh.tensor", "model.remat"),
    *("training.seq_len", "training.minibatch_rows", "training.grad_accum_steps"),
    *("sampling.tensor", "sampling.slots", "sampling.kv_tokens"),
)
"""The settings that are chosen. None of them changes what is trained, nor in how many updates."""
SIZES = (1, 2, 4)  # of the axis "tensor", rows per device, and rows' length in longest contexts, besides the preset's
MAX_SLOTS = 256  # that a host gets unless the preset has more
SHARES = (1, 3 / 4, 1 / 2, 3 / 8, 1 / 4, 3 / 16, 1 / 8, 1 / 16, 1 / 32)  # of the most slots


@dataclass(frozen=True)
class Candidate:
    """One way to train on a slice."""

    config: RunConfig
    rows_per_device: float  # of a micro-batch
    saved_bytes: float  # per device, at least
    seconds: float  # of reference and update per step, at the roofline
    updates: int  # optimiser steps per step

    @property
    def row_tokens(self) -> int:
        return self.config.training.seq_len

    def exceeds(self, limit: float, others: Sequence[TooLarge]) -> bool:
        """Whether this way needs more than `limit` bytes, judged by compiled ones that need more.

        What a policy saves is known but for "none", which also saves what its name does not list; temporary memory
        grows with the rows and with their length.
        """
        for other in others:
            if other.candidate.config.mesh != self.config.mesh:
                continue
            less_saved = other.candidate.saved_bytes - self.saved_bytes
            if less_saved <= 0:
                return True
            is_as_large = (
                self.rows_per_device >= other.candidate.rows_per_device
                and self.row_tokens >= other.candidate.row_tokens
                and other.candidate.config.model.remat != "none"
            )
            if is_as_large and other.needed_bytes - less_saved > limit:
                return True
        return False


@dataclass(frozen=True)
class TooLarge:
    """A candidate that does not fit."""

    candidate: Candidate
    needed_bytes: float  # of a device, as far as it is known


def training_candidates(config: RunConfig, workload: Workload, topology: Topology) -> list[Candidate]:
    """All valid candidates, fastest first; of equally fast ones, the one with the lowest memory first.

    Tensor parallelism, whose exchanges are left out, comes last. A mini-batch whose rows the devices cannot share gets
    more rows, which stay empty. Micro-batches so large that a step would make fewer updates are no candidates.
    """
    devices = len(topology.devices)
    lengths = sorted({config.training.seq_len, *(size * config.sampling.context_tokens for size in SIZES)})
    found = []
    for tensor, rows, seq_len, remat in itertools.product(SIZES, SIZES, lengths, REMAT):
        mesh = replace(config.mesh, data=topology.slices, fsdp=-1, tensor=tensor)
        if not _splits(config, topology.devices, mesh) or seq_len % config.training.logit_chunk:
            continue
        rows_at_once = rows * devices // tensor
        steps = math.ceil(config.training.minibatch_rows / rows_at_once)
        training = replace(
            config.training, seq_len=seq_len, minibatch_rows=steps * rows_at_once, grad_accum_steps=steps
        )
        trained = replace(config, mesh=mesh, model=replace(config.model, remat=remat), training=training)
        phases = roofline.training_phases(trained, workload, topology)
        seconds = sum(phase.seconds for phase in phases)
        saved_bytes = min_saved_bytes(trained, devices)
        updates = roofline.updates_per_step(trained, workload)
        found.append(Candidate(trained, rows / tensor, saved_bytes, seconds, updates))
    if not found:
        raise ValueError(
            f"no row of {' or '.join(map(str, lengths))} tokens is a multiple of training.logit_chunk "
            f"{config.training.logit_chunk}: choose another"
        )

    # Tensor parallelism makes smaller micro-batches; more updates alone are no reason for its exchanges.
    least_tensor = min(candidate.config.mesh.tensor for candidate in found)
    most_updates = max(candidate.updates for candidate in found if candidate.config.mesh.tensor == least_tensor)
    found = [candidate for candidate in found if candidate.updates >= most_updates]

    def order(candidate: Candidate) -> tuple[int, float, float]:
        return candidate.config.mesh.tensor, round(candidate.seconds, 3), candidate.saved_bytes

    return sorted(found, key=order)


def chosen_settings(config: RunConfig) -> dict[str, Any]:
    """The value of each of `SETTINGS`."""
    values = settings(config)
    return {name: values[name] for name in SETTINGS}


def flags_between(config: RunConfig, other: RunConfig) -> str:
    """The flags that turn `config` into `other`; "" if they are equal."""
    return " ".join(f"--{name} {value}" for name, _, value in differences(config, other))


def other_ways(config: RunConfig) -> str:
    """What to try where none of the candidates fits."""
    ways = ["a larger slice"]
    if not config.model.lora_rank:
        ways.append("--model.lora_rank 16 (adapters)")
    if config.training.kl_coefficient and not config.training.offload_reference and not config.model.lora_rank:
        ways.append("--training.offload_reference True")
    if not config.sampling.is_quantized:
        ways.append("--sampling.weights int8 --sampling.kv int8")
    return ", ".join(ways)


def sampler_candidates(config: RunConfig, topology: Topology) -> list[RunConfig]:
    """Samplers that the devices of a host can share, the best first.

    As many slots as trajectories run on a host, at most `MAX_SLOTS` or what the preset has, with as much of the cache
    for each slot as in the preset. The weights are copied as often as in the preset, or less often where at most half
    of these slots would fit otherwise.
    """
    sampling = config.sampling
    host_devices = len(topology.host_devices)
    trajectories = math.ceil(config.rl.prompts_per_step * config.rl.group_size / topology.hosts)
    most_slots = max(sampling.slots, min(MAX_SLOTS, trajectories))
    slot_tokens = sampling.kv_tokens / sampling.slots if sampling.kv_tokens else sampling.context_tokens
    tensors = list(_sampler_tensors(config, topology))
    most_copies = max((tensor for tensor in tensors if tensor <= sampling.tensor), default=tensors[0])
    found = []
    for tensor, share in itertools.product([tensor for tensor in tensors if tensor >= most_copies], SHARES):
        replicas = host_devices // tensor
        slots = int(most_slots * share) // replicas * replicas
        if slots:
            found.append(replace(config, sampling=_with_slots(sampling, tensor, slots, slot_tokens, replicas)))

    if not found:
        raise ValueError(f"{most_slots} slots are too few for {host_devices} devices: raise sampling.slots")

    def order(candidate: RunConfig) -> tuple[bool, int, int]:
        sampling = candidate.sampling
        return sampling.slots <= most_slots / 2, sampling.tensor, -sampling.slots

    return sorted(found, key=order)


def _with_slots(sampling: SamplingConfig, tensor: int, slots: int, slot_tokens: float, replicas: int) -> SamplingConfig:
    """`slots` slots with `slot_tokens` of the cache for each, and a complete context for each replica at least."""
    context = sampling.context_pages * sampling.page_tokens
    kv_tokens = max(int(slots * slot_tokens), replicas * context)
    if kv_tokens >= slots * context:
        kv_tokens = 0  # a complete context for each slot
    return replace(sampling, tensor=tensor, slots=slots, kv_tokens=kv_tokens)


def _sampler_tensors(config: RunConfig, topology: Topology) -> Iterator[int]:
    """The numbers of devices that can share a copy of the sampler's weights, ascending."""
    host_devices = topology.host_devices
    for tensor in range(1, len(host_devices) + 1):
        if _splits(config, host_devices, MeshConfig(data=-1, fsdp=1, tensor=tensor)):
            yield tensor


def _splits(config: RunConfig, devices: Sequence[object], mesh: MeshConfig) -> bool:
    """Whether the mesh has these devices and splits every weight into equal parts."""
    try:
        sharding.check_divides(config.model, mesh.shape(len(devices)))
    except ValueError:
        return False
    return True


def min_saved_bytes(config: RunConfig, devices: int) -> float:
    """A lower bound of what a device saves for the backward pass: each layer's input, and what the policy names."""
    model = config.model
    training = config.training
    tensor = config.mesh.shape(devices)["tensor"]
    queries = model.heads * model.head_size
    keys_and_values = 2 * model.kv_heads * model.head_size
    # What each policy saves in addition to the one before it, per token. "none" saves all four arrays of the
    # feed-forward block.
    added = {
        "nothing_saveable": 0,
        "save_attention": queries,
        "save_qkv_attention": queries + keys_and_values,
        "save_qkv_attention_up": model.ffn_size,
        "save_qkv_attention_gate_up": model.ffn_size,
        "none": 2 * model.ffn_size,
    }
    assert tuple(added) == REMAT[::-1]
    saved_by = list(added).index(model.remat) + 1
    split = sum(list(added.values())[:saved_by]) / tensor
    rows = math.ceil(training.minibatch_rows // training.grad_accum_steps * tensor / devices)
    return rows * training.seq_len * model.layers * model.compute_itemsize * (model.embed_size + split)
