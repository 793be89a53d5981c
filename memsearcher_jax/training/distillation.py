"""The objectives `distill` and `grpo+distill`: a teacher's advantage, or its loss, for each token that it teaches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from memsearcher_jax.ops.axes import constrain_rows
from memsearcher_jax.training import masked
from memsearcher_jax.training.config import TeacherConfig
from memsearcher_jax.training.packing import PackedBatch, PackedRows, TrainingExample


@dataclass(frozen=True)
class Distillation:
    """The `Objective` of a run with a teacher.

    With `teacher.top_k` the teacher adds to the loss (`losses.grpo_loss`), else to the advantages.
    """

    teacher: TeacherConfig
    keep_rewards: bool  # grpo+distill: the teacher's advantage is added to that of the trajectory

    def keep(self, examples: Sequence[TrainingExample]) -> Sequence[TrainingExample]:
        if self.keep_rewards:
            return examples
        return [replace(example, advantage=0.0) for example in examples]

    def make_batch(self, rows: PackedRows) -> PackedBatch:
        batch = rows.batch()
        weights = [self._weight(example) for example in rows.examples]
        weight_BT = np.where(batch.mask_BT, rows.per_token(weights, np.float32), np.float32(0))
        return replace(batch, teacher_weight_BT=weight_BT)

    def prepare(self, batch: PackedBatch) -> tuple[PackedBatch, dict[str, jax.Array]]:
        if self.teacher.top_k:
            return batch, {}  # the metrics are those of the loss
        return teacher_advantages(batch)

    def finish(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """`teacher_kl` in nats per taught token, from the sums of `divergence_sums`; NaN: no token was taught."""
        return dict(metrics) | {"teacher_kl": metrics["teacher_kl"] / (metrics["taught_tokens"] or math.nan)}

    def _weight(self, example: TrainingExample) -> float:
        is_taught = self.teacher.on == "all" or not example.correct
        return self.teacher.coefficient if is_taught else 0.0


@jax.jit
def teacher_advantages(batch: PackedBatch) -> tuple[PackedBatch, dict[str, jax.Array]]:
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
