"""Settings of the optimiser and the loss. No JAX here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Aggregate = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Ratio = Literal["token", "sequence"]


@dataclass(frozen=True)
class TrainingConfig:
    """Multi-context GRPO. Defaults: the paper's settings."""

    row_tokens: int = 8_192
    """Length T of a packed row; every context must fit one."""
    rows_per_update: int = 256
    """Packed rows that one optimiser step sees."""
    accumulate: int = 1
    """Micro-batches that one optimiser step is split into; divides rows_per_update. Fewer where many devices share."""
    logit_chunk: int = 1_024
    """Tokens of a row whose logits exist at one time; divides row_tokens."""
    learning_rate: float = 1e-6
    """Of AdamW, after the warm-up."""
    warmup_steps: int = 0
    """Optimiser steps over which the learning rate rises from 0."""
    decay_steps: int = 0
    """Optimiser steps after the warm-up over which the learning rate falls to 0; 0: it stays."""
    weight_decay: float = 0.01
    """Of AdamW, decoupled from the gradient."""
    adam_b1: float = 0.9
    """Decay of the mean of gradients."""
    adam_b2: float = 0.999
    """Decay of the mean of squared gradients."""
    max_grad_norm: float = 1.0
    """A longer gradient is scaled down to this norm."""
    clip_low: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = 0.2
    """See clip_low."""
    clip_c: float = 3.0
    """Dual clip: bound of the loss for negative advantages, as a multiple of the advantage."""
    ratio: Ratio = "token"
    """What the ratio of policies is taken of: each token, or a context's sampled tokens together, as their geometric
    mean (GSPO, whose clip ranges are a thousand times narrower)."""
    aggregate: Aggregate = "token-mean"
    """How a mini-batch's token losses become one number: a mean over tokens, or over contexts of their sum, their mean,
    or their sum over a constant (Dr. GRPO)."""
    norm_tokens: int = 1_024
    """That constant, of seq-mean-token-sum-norm."""
    old_logprobs: Literal["sampler", "checked", "trainer"] = "sampler"
    """Whose log-probabilities the ratio compares with: the sampler's as recorded, at no cost; the trainer's own, which
    is one more forward pass over everything; or the sampler's as long as they agree with the trainer's on the first
    mini-batch of a step, else the trainer's."""
    old_logprob_threshold: float = 0.02
    """Of checked: the largest mean difference per token, in nats, that counts as agreement."""
    importance_cap: float = 0.0
    """With the trainer's log-probabilities: a loss is weighted by trainer over sampler, at most this much; 0: not."""
    kl_coefficient: float = 0.001
    """Weight of the k3 divergence from the starting weights; 0 keeps no reference model."""
    entropy_coefficient: float = 0.001
    """Weight of the entropy that the loss rewards; 0 leaves it out."""
