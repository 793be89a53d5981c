"""Settings of the optimiser and the loss. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memsearcher_jax.ranges import AboveOne, Count, CountOrZero, Decay, NonNegative, Positive, Probability

Aggregate = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
ImportanceLevel = Literal["token", "sequence"]


@dataclass(frozen=True)
class TrainingConfig:
    """Multi-context GRPO. Defaults: the paper's settings."""

    seq_len: Count = 8_192
    """Length T of a packed row; every context must fit into one."""
    minibatch_contexts: Count = 640
    """Contexts per optimiser step: a step makes ceil(contexts / minibatch_contexts) updates of about equal size. An
    update has at least one micro-batch of rows, and never more than minibatch_rows."""
    minibatch_rows: Count = 256
    """Most packed rows per optimiser step; rows that stay empty cost nothing."""
    grad_accum_steps: Count = 1
    """Micro-batches per optimiser step; divides minibatch_rows. Lowered if the devices need more rows each."""
    logit_chunk: Count = 1_024
    """Tokens of a row whose logits exist at a time; divides seq_len."""
    learning_rate: Positive = 1e-6
    """Learning rate of AdamW after the warm-up."""
    warmup_steps: CountOrZero = 0
    """Optimiser steps over which the learning rate rises from 0."""
    decay_steps: CountOrZero = 0
    """Optimiser steps after the warm-up over which the learning rate falls to 0; 0: constant."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay of AdamW."""
    adam_b1: Decay = 0.9
    """Decay of the first moment."""
    adam_b2: Decay = 0.999
    """Decay of the second moment."""
    max_grad_norm: Positive = 1.0
    """Gradients are clipped to this global norm."""
    clip_low: Probability = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: NonNegative = 0.2
    """See clip_low."""
    dual_clip: AboveOne = 3.0
    """Dual clip: bound of the loss for negative advantages, as a multiple of the advantage."""
    importance_sampling_level: ImportanceLevel = "token"
    """The policy ratio is per token, or per sequence: the geometric mean over the sampled tokens of a context (GSPO,
    whose clip ranges are a thousand times narrower)."""
    aggregate: Aggregate = "token-mean"
    """How the token losses of a mini-batch are averaged: over tokens, or over contexts after summing or averaging
    within each. seq-mean-token-sum-norm sums all of them and divides by norm_tokens (Dr. GRPO)."""
    norm_tokens: Count = 1_024
    """The divisor of seq-mean-token-sum-norm: tokens of a context, or of a mini-batch to keep the gradient's norm near
    that of the other aggregates."""
    old_logprobs: Literal["sampler", "trainer"] = "sampler"
    """Old log-probabilities of the ratio: those that the sampler recorded, or, for one more forward pass, those of the
    trainer."""
    tis_cap: NonNegative = 0.0
    """Truncated importance sampling: policy losses are weighted by min(trainer / sampler, tis_cap) where the trainer's
    old log-probabilities are used; 0: off."""
    kl_coefficient: NonNegative = 0.001
    """Weight of the k3 divergence from the initial weights, with LoRA from those in model.path; 0: no reference."""
    offload_reference: bool = False
    """Keep the reference model in the pinned memory of the host between uses. With LoRA it is the frozen base of every
    update, and stays on the devices."""
    entropy_coefficient: NonNegative = 0.001
    """Weight of the entropy bonus; 0: off."""
