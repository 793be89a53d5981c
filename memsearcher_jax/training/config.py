"""Settings of the optimiser and the loss. Imports no JAX."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from memsearcher_jax.ranges import (
    AboveOne,
    Count,
    CountOrZero,
    Decay,
    Duration,
    NonNegative,
    Positive,
    Probability,
    parse_duration,
    parse_percent,
)

Aggregate = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

TrainOn = Literal["all", "actions", "memories"]


@dataclass(frozen=True)
class TrainingConfig:
    """Multi-context GRPO. Defaults: the paper's settings."""

    objective: Literal["grpo", "distill", "grpo+distill"] = "grpo"
    """What the advantage of a token is: that of its trajectory (grpo), how much more likely the token is for the
    teacher than for the policy that sampled it (distill: minus the reverse KL divergence), or their sum."""
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
    warmup_steps: str = "0"
    """How long the learning rate rises from 0: training steps (10), a share of the run (5%), or optimiser steps
    (80 updates)."""
    decay_steps: str = "0"
    """How long it falls to 0 after the warm-up, written in the same way, or `end`: until the end of the run. 0: it is
    constant."""
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
    aggregate: Aggregate = "token-mean"
    """How the token losses of a mini-batch are averaged: over tokens, or over contexts after summing or averaging
    within each. seq-mean-token-sum-norm sums all of them and divides by norm_tokens (Dr. GRPO)."""
    norm_tokens: Count = 1_024
    """The divisor of seq-mean-token-sum-norm: tokens of a context, or of a mini-batch to keep the gradient's norm near
    that of the other aggregates."""
    old_logprobs: Literal["auto", "sampler", "trainer"] = "auto"
    """Old log-probabilities of the ratio: those that the sampler recorded, or, for one more forward pass, those of the
    trainer. auto: those of the sampler; if it rounds to int8, those of the trainer, with tis_cap 2 unless that is
    set."""
    tis_cap: NonNegative = 0.0
    """Truncated importance sampling: policy losses are weighted by min(trainer / sampler, tis_cap) where the trainer's
    old log-probabilities are used; 0: off."""
    kl_coefficient: NonNegative = 0.001
    """Weight of the k3 divergence from the initial weights, with LoRA from those in model.path, or from the teacher; 0:
    none."""
    offload_reference: bool = False
    """Keep the reference model, or the teacher, in the pinned memory of the host between uses. Without a teacher the
    reference of LoRA is the frozen base of every update, and stays on the devices."""
    entropy_coefficient: NonNegative = 0.001
    """Weight of the entropy bonus; 0: off."""
    train_on: TrainOn = "all"
    """Which sampled tokens are trained: all, those of actions (thoughts, tool calls, answers), or those of memories
    (rewrites, summaries, states). Every reply of mem1 and memalpha is a memory."""
    memory_weight: Positive = 1.0
    """Weight of the tokens of memories in the loss; those of actions have 1."""

    @property
    def needs_kinds(self) -> bool:
        """Whether contexts have to say which of their tokens are those of memories."""
        return self.train_on != "all" or self.memory_weight != 1


@dataclass(frozen=True)
class TeacherConfig:
    """A model whose log-probabilities of the sampled tokens replace those of the reference."""

    path: str = ""
    """Its weights, which are not trained: a run, a Hugging Face folder or OWNER/NAME on the Hub, of any size, with the
    vocabulary of the policy. "": none."""
    top_k: CountOrZero = 0
    """Its most likely tokens in the place of each sampled one, towards which the policy is trained: the forward
    divergence over them is a loss. 0: the sampled token alone, by an advantage: the reverse divergence."""
    on: Literal["all", "wrong"] = "all"
    """Which trajectories it teaches: all, or those with a wrong answer (DGPO: arXiv 2508.20324)."""
    coefficient: Positive = 1.0
    """Weight of its advantage, or of its loss."""


@dataclass(frozen=True)
class LearningRatePlan:
    """Linear warm-up to `peak`, then linear decay to 0. Training steps or updates are counted from 0 in the run."""

    peak: float
    warmup: Duration
    decay: Duration  # in the unit of the warm-up; 0: constant

    def __str__(self) -> str:
        rises = f"begins at {self.peak:g} and "
        if self.warmup.count:
            rises = f"rises to {self.peak:g} in {self.warmup}, then "
        if not self.decay.count:
            return f"{rises}is constant"
        return f"{rises}falls to 0 at {self.decay.unit.rstrip('s')} {self.warmup.count + self.decay.count}"


def learning_rate_plan(config: TrainingConfig, steps: int | None = None) -> LearningRatePlan:
    """The plan of a run of `steps` training steps; None: not known, for durations that do not depend on it.

    The end of a decay that is a share of the run is rounded up, and not its length down: 5% and 95% end with the run.

    Raises ValueError for a duration that cannot be read, two of different units, and a rate of 0 before the end.
    """
    warmup = parse_duration("training.warmup_steps", config.warmup_steps, steps)
    warmup_percent = parse_percent(config.warmup_steps)
    decay_percent = parse_percent(config.decay_steps)
    if config.decay_steps == "end" and steps is not None:
        decay = Duration(max(0, steps - warmup.count))
    elif steps is not None and decay_percent:
        warmup_hundredths = steps * warmup_percent if warmup_percent else 100 * warmup.count
        end = math.ceil((warmup_hundredths + steps * decay_percent) / 100)
        decay = Duration(end - warmup.count)
    else:
        decay = parse_duration("training.decay_steps", config.decay_steps, steps)
    if not warmup.count or not decay.count:
        unit = (warmup if warmup.count else decay).unit
        warmup = replace(warmup, unit=unit)
        decay = replace(decay, unit=unit)
    if warmup.unit != decay.unit:
        raise ValueError(
            f"training.warmup_steps {config.warmup_steps} and training.decay_steps {config.decay_steps} differ in "
            "their unit: give both in training steps, or both in updates"
        )
    end = warmup.count + decay.count
    if steps is not None and decay.count and decay.unit == "steps" and end < steps:
        raise ValueError(
            f"training.decay_steps {config.decay_steps}: the learning rate is 0 from training step {end} of {steps} "
            "on: set it to end"
        )
    return LearningRatePlan(config.learning_rate, warmup, decay)


def with_plan(config: TrainingConfig, plan: LearningRatePlan) -> TrainingConfig:
    """The config with the durations of the plan, which no longer depend on the length of the run."""
    return replace(config, warmup_steps=str(plan.warmup), decay_steps=str(plan.decay))
