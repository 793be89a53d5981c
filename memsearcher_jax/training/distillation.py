"""What a teacher adds to a step: weights of its advantages, the advantages, and the contexts with hints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from memsearcher_jax.ops.axes import constrain
from memsearcher_jax.training import masked
from memsearcher_jax.training.config import Objective, TeacherConfig
from memsearcher_jax.training.packing import PackedBatch, TrainingExample


def teacher_weights(config: TeacherConfig, packed: PackedBatch, examples: Sequence[TrainingExample]) -> np.ndarray:
    """teacher_weight_BT: that of the teacher's advantage for each token."""
    taught_E = np.array([is_taught(config, one) and (config.on == "all" or not one.correct) for one in examples])
    return np.where(packed.mask_BT, config.coefficient * taught_E[packed.example_BT], 0).astype(np.float32)


def is_taught(config: TeacherConfig, example: TrainingExample) -> bool:
    """Whether the teacher is another than the policy: by its weights, or by a hint."""
    return bool(config.path or example.hint)


@partial(jax.jit, static_argnums=0)
def advantages(objective: Objective, batch: PackedBatch) -> tuple[PackedBatch, jax.Array]:
    """The batch with the teacher's advantages, and the mean reverse KL divergence from the teacher, in nats per token.

    A sampled token's divergence is estimated by the policy's log-probability minus the teacher's; minus this, times
    `teacher_weight_BT`, is its advantage (on-policy distillation: Agarwal et al. 2024, arXiv 2306.13649; as an
    advantage: Lu et al. 2025, "On-Policy Distillation"). "grpo+distill" adds it to that of the trajectory.
    """
    assert batch.ref_logprob_BT is not None and batch.teacher_weight_BT is not None, "the objective has a teacher"
    mask_BT = batch.mask_BT
    log_ratio_BT = jnp.where(mask_BT, batch.old_logprob_BT - batch.ref_logprob_BT, 0)
    own_BT = 0 if objective == "distill" else batch.advantage_BT
    batch = replace(batch, advantage_BT=own_BT - batch.teacher_weight_BT * log_ratio_BT, teacher_weight_BT=None)
    batch = jax.tree.map(lambda x: constrain(x, ("batch", None)), batch)
    return batch, masked.mean(log_ratio_BT, mask_BT)


def with_hint(example: TrainingExample, seq_len: int) -> TrainingExample:
    """The example with its hint, which is cut where a row ends."""
    hint = np.asarray(example.hint, np.int32)[: seq_len - len(example.ids)]
    fields = {"ids": hint, "logprobs": 0.0, "sampled": False}
    places = np.full(len(hint), example.hint_place)
    return replace(example, **{name: np.insert(getattr(example, name), places, x) for name, x in fields.items()})
