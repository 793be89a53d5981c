"""The ways to train on a slice that `--suggest` tries: remat policies, rows and their length, tensor parallelism."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from memsearcher_jax.config import RunConfig
from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.planning import roofline
from memsearcher_jax.planning.roofline import Topology, Workload

# By activation memory, most first.
REMAT = ("none", "save_qkv_attention_up", "save_qkv_attention", "save_attention", "nothing_saveable")
SIZES = (1, 2, 4)  # of the axis "tensor", rows per device, and rows' length in longest contexts


@dataclass(frozen=True)
class Candidate:
    """One way to train on a slice."""

    config: RunConfig
    rows: int  # of a micro-batch, per device or group of "tensor" devices
    seconds: float  # of reference and update per step, at the roofline

    def needs_more_memory_than(self, other: Candidate) -> bool:
        """Whether it certainly needs at least as much: the same mesh, as many tokens, and as much saved for each."""
        mine, others = self.config, other.config
        return (
            mine.mesh == others.mesh
            and self.rows * mine.training.seq_len >= other.rows * others.training.seq_len
            and REMAT.index(mine.model.remat) <= REMAT.index(others.model.remat)
        )

    def __str__(self) -> str:
        """Its flags."""
        mesh, training = self.config.mesh, self.config.training
        return (
            f"--mesh.fsdp {mesh.fsdp} --mesh.tensor {mesh.tensor} --model.remat {self.config.model.remat} "
            f"--training.seq_len {training.seq_len} --training.grad_accum_steps {training.grad_accum_steps}"
        )


def candidates(config: RunConfig, workload: Workload, topology: Topology) -> list[Candidate]:
    """All valid candidates, fastest first; of equally fast ones, the one with the lowest memory first.

    Tensor parallelism comes last: each layer waits for its exchanges, which the roofline leaves out.
    """
    found, devices = [], len(topology.devices)
    for tensor, rows, longest, remat in itertools.product(SIZES, SIZES, SIZES, REMAT):
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
        phases = roofline.training_phases(one, workload, topology, tensor=tensor, sent_bytes={})
        found.append(Candidate(one, rows, sum(phase.seconds for phase in phases)))
    return sorted(found, key=_order)


def min_row_bytes(config: RunConfig) -> float:
    """A lower bound of the bytes saved per row for the backward pass: each layer's input, and what the policy names."""
    model, saved = config.model, REMAT[::-1].index(config.model.remat)
    heads, kv = model.heads * model.head_size, 2 * model.kv_heads * model.head_size
    # Split over the axis "tensor". "none" saves all four arrays of the feed-forward block.
    split = sum((heads, heads + kv, model.ffn_size, 3 * model.ffn_size)[:saved])
    inputs = model.compute_itemsize * model.layers * config.training.seq_len
    return inputs * (model.embed_size + split / config.mesh.tensor)


def _order(one: Candidate) -> tuple[float, ...]:
    config = one.config
    tokens = one.rows * config.training.seq_len
    return config.mesh.tensor, round(one.seconds, 3), tokens, -REMAT.index(config.model.remat)
