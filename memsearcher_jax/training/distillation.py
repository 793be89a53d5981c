"""What a teacher adds to a step: weights of its advantages, and the advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from memsearcher_jax.ops.axes import constrain_rows
from memsearcher_jax.training import masked
from memsearcher_jax.training.config import TeacherConfig
from memsearcher_jax.training.packing import PackedBatch, TrainingExample


def teacher_weights(config: TeacherConfig, packed: PackedBatch, examples: Sequence[TrainingExample]) -> np.ndarray:
    """teacher_weight_BT: that of the teacher's advantage or loss for each token."""
    taught_E = np.array([config.on == "all" or not example.correct for example in examples])
    return np.where(packed.mask_BT, config.coefficient * taught_E[packed.example_BT], 0).astype(np.float32)


@jax.jit
def advantages(batch: PackedBatch) -> tuple[PackedBatch, dict[str, jax.Array]]:
    """The batch with the teacher's advantages, and the reverse KL divergence from the teacher, as `divergence_sums`.

    A sampled token's divergence is estimated by the policy's log-probability minus the teacher's; minus this, times
    `teacher_weight_BT`, is added to its advantage (on-policy distillation: Agarwal et al. 2024, arXiv 2306.13649; as
    an advantage: Lu et al. 2025, "On-Policy Distillation").
    """
    assert batch.ref_logprob_BT is not None and batch.teacher_weight_BT is not None, "the objective has a teacher"
    log_ratio_BT = jnp.where(batch.mask_BT, batch.old_logprob_BT - batch.ref_logprob_BT, 0)
    advantage_BT = batch.advantage_BT - batch.teacher_weight_BT * log_ratio_BT
    taught = replace(batch, advantage_BT=advantage_BT, teacher_weight_BT=None)
    return constrain_rows(taught), divergence_sums(log_ratio_BT, batch)


def divergence_sums(divergence_BT: jax.Array, batch: PackedBatch) -> dict[str, jax.Array]:
    """`teacher_kl` in nats and `taught_tokens`, summed over the tokens that the teacher teaches."""
    taught_BT = jnp.where(batch.teacher_weight_BT != 0, batch.count_BT, 0)
    return {"teacher_kl": masked.weighted_sum(divergence_BT, taught_BT), "taught_tokens": jnp.sum(taught_BT)}
