"""The ways to train on a slice that `--suggest` tries: remat policies, rows and their length, tensor parallelism."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import NamedTuple

from memsearcher_jax.config import RunConfig
from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import REMAT, MeshConfig
from memsearcher_jax.planning import roofline
from memsearcher_jax.planning.roofline import Topology, Workload

SIZES = (1, 2, 4)  # of the axis "tensor", rows per device, and rows' length in longest contexts


class Candidate(NamedTuple):
    """One way to train on a slice."""

    config: RunConfig
    saved_bytes: float  # per device, at least
    seconds: float  # of reference and update per step, at the roofline


def candidates(config: RunConfig, workload: Workload, topology: Topology) -> list[Candidate]:
    """All valid candidates, fastest first; of equally fast ones, the one with the lowest memory first.

    Tensor parallelism, whose exchanges are left out, comes last. ValueError if the devices cannot share a mini-batch.
    """
    found, devices = [], len(topology.devices)
    tensors = [size for size in SIZES if devices % size == 0]
    for tensor, rows, longest, remat in itertools.product(tensors, SIZES, SIZES, REMAT):
        seq_len, mesh = longest * config.sampling.context_tokens, MeshConfig(1, devices // tensor, tensor)
        steps, odd_rows = divmod(config.training.minibatch_rows, rows * mesh.fsdp)
        if odd_rows or seq_len % config.training.logit_chunk:
            continue
        try:
            sharding.check_divides(config.model, mesh.shape(devices))
        except ValueError:
            continue
        training = replace(config.training, seq_len=seq_len, grad_accum_steps=steps)
        one = replace(config, mesh=mesh, model=replace(config.model, remat=remat), training=training)
        phases = roofline.training_phases(one, workload, topology)
        found.append(Candidate(one, min_saved_bytes(one, devices), sum(phase.seconds for phase in phases)))
    if not found:
        raise ValueError(f"choose training.minibatch_rows that {devices} devices can share: a multiple")
    return sorted(found, key=lambda one: (one.config.mesh.tensor, round(one.seconds, 3), one.saved_bytes))


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
