"""One training step: pack examples, compute reference log-probabilities, take the optimiser steps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from memsearcher_jax.model import lora, sharding
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.qwen import Params
from memsearcher_jax.ops.axes import constrain_rows
from memsearcher_jax.training import distillation, grpo, losses, update
from memsearcher_jax.training.config import TeacherConfig, TrainingConfig, learning_rate_plan, with_plan
from memsearcher_jax.training.logprobs import LogprobFn, make_logprob_fn
from memsearcher_jax.training.losses import Metrics
from memsearcher_jax.training.packing import PackedBatch, TrainingExample, merge_equal, pack
from memsearcher_jax.training.update import TrainState

PINNED_HOST = "pinned_host"  # JAX's kind of memory
NO_TEACHER = TeacherConfig()
LOSS_FNS = {"grpo": losses.grpo_loss, "sft": losses.sft_loss}
LAST_TURN = 10  # with metrics of its own


@dataclass(frozen=True)
class Reference:
    """A frozen model whose log-probabilities of the rows an objective needs: the initial policy, or the teacher."""

    logprob_fn: LogprobFn
    params: Params  # in compute_dtype, on the devices or in the host's memory
    top_k: int = 0  # of a teacher: the most likely tokens in the place of each, in place of the sampled one's

    def score(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """The batches with what `logprob_fn` says of each."""
        params = _move(self.params, "device")
        # A copy from the host is freed before the first update is dispatched.
        scores = jax.block_until_ready([self.logprob_fn(params, batch) for batch in batches])
        if not self.top_k:
            return [
                replace(batch, ref_logprob_BT=logprob_BT) for batch, logprob_BT in zip(batches, scores, strict=True)
            ]
        return [
            replace(batch, teacher_ids_BTK=ids_BTK, teacher_probability_BTK=probability_BTK)
            for batch, (ids_BTK, probability_BTK) in zip(batches, scores, strict=True)
        ]


@dataclass(frozen=True)
class Trainer:
    """The compiled training functions and the frozen weights."""

    config: TrainingConfig
    mesh: Mesh
    update: Callable[..., tuple[TrainState, Metrics]]
    logprob_fn: LogprobFn
    make_update: Callable[[TrainingConfig], Callable[..., tuple[TrainState, Metrics]]]
    reference: Reference | None = None  # None if neither a KL term nor the objective needs it
    teacher: TeacherConfig = NO_TEACHER
    base: Params | None = None  # LoRA: the frozen weights, in compute_dtype
    merge: Callable[[Params, Params], Params] | None = None  # LoRA: (frozen weights, adapters) -> weights

    def with_learning_rate(self, learning_rate: float) -> Trainer:
        """A trainer that differs in nothing else."""
        config = replace(self.config, learning_rate=learning_rate)
        return replace(self, config=config, update=self.make_update(config))

    def weights(self, state: TrainState) -> Params:
        """The weights of the model in this state; with LoRA a merged copy in compute_dtype."""
        return self.merge(self.base, state.params) if self.merge and self.base else state.params

    def step(
        self,
        state: TrainState,
        examples: Sequence[TrainingExample],
        rng: np.random.Generator,
        notify: Callable[[str], None],
        training_step: int,
    ) -> tuple[TrainState, dict[str, float]]:
        """Trains on all examples once, one mini-batch at a time. `state` is donated; `notify` receives the progress.
        Equal examples, which a policy of low entropy often samples, are computed once and count as often as they are.
        `training_step`: steps of the run before this one, by which the learning rate may be planned.

        Returns the new state and metrics, which are means over the mini-batches that were not skipped, except those of
        `mismatch_metrics`, which are of the first mini-batch, before any update, and `teacher_kl`, in nats per taught
        token; NaN: there is none. `skipped_updates` counts the mini-batches with a gradient that was not finite.
        """
        objective, teacher = self.config.objective, self.teacher
        if objective == "distill":
            examples = [replace(example, advantage=0.0) for example in examples]
        if not examples:
            return state, {"updates": 0.0}
        examples = merge_equal(examples)
        packed = self._pack(examples, rng)
        metrics_by_update = []
        with jax.set_mesh(self.mesh):
            params = self.weights(state) if self.config.old_logprobs == "trainer" else state.params
            if objective != "grpo":
                packed = replace(packed, teacher_weight_BT=distillation.teacher_weights(teacher, packed, examples))
            batches = list(packed.split(self.config.minibatch_rows))
            first, sharded = batches[0], list(map(self._shard, batches))
            batches, step_metrics = resolve_old_logprobs(self.config, self.logprob_fn, params, sharded, first)
            del params
            if self.reference:
                notify("teacher" if teacher.path else "reference")
                batches = self.reference.score(batches)
            if objective != "grpo" and not teacher.top_k:
                batches, sums = zip(*map(distillation.advantages, batches), strict=True)
                step_metrics |= {name: float(np.mean([one[name] for one in jax.device_get(sums)])) for name in sums[0]}
            for number, batch in enumerate(batches, start=1):
                notify(f"mini-batch {number}/{len(batches)}")
                state, metrics = self.update(state, batch, self.base, np.int32(training_step))
                logprob_BT = metrics.pop("logprob_BT", None)
                if number == 1 and logprob_BT is not None:
                    step_metrics |= mismatch_metrics(first, logprob_BT)
                metrics_by_update.append({name: float(value) for name, value in jax.device_get(metrics).items()})
        means = _mean_metrics(metrics_by_update) | step_metrics
        if not means["learning_rate"]:
            warnings.warn(  # one text is shown once
                "training changes nothing any more: the learning rate is 0, it "
                f"{learning_rate_plan(self.config)}; set training.decay_steps to end, or to a longer time",
                stacklevel=2,
            )
        if "teacher_kl" in means:  # the sums of `distillation.divergence_sums`
            means["teacher_kl"] /= means["taught_tokens"] or math.nan
        return state, means

    def sequence_logprobs(
        self, params: Params, examples: Sequence[TrainingExample], rng: np.random.Generator
    ) -> np.ndarray:
        """float64 [len(examples)], in no fixed order: the log-probability of all the trained tokens of each example.

        Collective.
        """
        logprobs = []
        with jax.set_mesh(self.mesh):
            for batch in self._pack(examples, rng).split(self.config.minibatch_rows):
                logprob_BT = multihost_utils.process_allgather(self.logprob_fn(params, self._shard(batch)), tiled=True)
                for segment_T, logprob_T in zip(batch.segment_BT, np.where(batch.mask_BT, logprob_BT, 0), strict=True):
                    logprobs.append(np.bincount(segment_T, weights=logprob_T)[1:])
        return np.concatenate(logprobs)

    def _pack(self, examples: Sequence[TrainingExample], rng: np.random.Generator) -> PackedBatch:
        config = self.config
        return pack(
            examples,
            config.seq_len,
            config.minibatch_rows,
            rng,
            microbatches=config.grad_accum_steps,
            minibatch_contexts=config.minibatch_contexts,
        )

    def _shard(self, batch: PackedBatch) -> PackedBatch:
        """Shards a batch, of which every host has a copy, over the devices of all hosts."""
        batch_sharding = sharding.named_sharding(self.mesh, ("batch", None))
        batch = replace(batch, number_BT=None, example_BT=None)
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, batch_sharding, x.__getitem__), batch)


def make_trainer(
    model_config: ModelConfig,
    config: TrainingConfig,
    mesh: Mesh,
    initial_params: Params,
    *,
    method: Literal["grpo", "sft"],
    temperature: float,
    steps: int | None = None,
    teacher: TeacherConfig = NO_TEACHER,
    teacher_model: tuple[ModelConfig, Params] | None = None,
) -> Trainer:
    """A trainer whose KL term compares with the teacher in `teacher.path`, or with a copy of `initial_params`.

    `temperature`: the sampler's. `steps`: training steps of the run, of which the learning rate's durations may be
    shares. With LoRA `initial_params`, in compute_dtype, are also what the adapters are added to, and they are not
    copied. `teacher_model`: that in `teacher.path`, in compute_dtype.
    """
    config = with_plan(update.fit_to_mesh(config, mesh), learning_rate_plan(config, steps))
    shardings = sharding.param_shardings(model_config, mesh)
    base = initial_params if model_config.lora_rank else None
    merge = jax.jit(partial(lora.merge, config=model_config), out_shardings=shardings) if base else None
    model_config = sharding.select_attention(model_config, mesh, config.seq_len)
    logprob_fn = make_logprob_fn(model_config, config, temperature=temperature)

    reference = None
    if teacher_model:
        taught_by, params = teacher_model
        taught_by = sharding.select_attention(taught_by, mesh, config.seq_len)
        teacher_fn = make_logprob_fn(taught_by, config, temperature=temperature, top_k=teacher.top_k)
        reference = Reference(teacher_fn, params, teacher.top_k)
    elif config.kl_coefficient:
        copy = base or sharding.cast_program(shardings)(initial_params, dtype=model_config.compute_dtype)
        reference = Reference(logprob_fn, copy)
    if reference and reference.params is not base and config.offload_reference:
        reference = replace(reference, params=_move(reference.params, PINNED_HOST))

    make_update = partial(update_program, model_config, mesh, method, temperature)
    return Trainer(config, mesh, make_update(config), logprob_fn, make_update, reference, teacher, base, merge)


@lru_cache(maxsize=8)
def update_program(
    model_config: ModelConfig, mesh: Mesh, method: Literal["grpo", "sft"], temperature: float, config: TrainingConfig
) -> Callable[..., tuple[TrainState, Metrics]]:
    """The compiled update of `make_trainer`. Runs of one process, as in a sweep, share it if these settings agree."""
    return update.make_update(
        model_config,
        config,
        update.make_optimizer(config),
        mesh,
        temperature=temperature,
        loss_fn=LOSS_FNS[method],
        # For the mismatch metrics: here no other program computes the trainer's log-probabilities.
        with_logprobs=method == "grpo" and config.old_logprobs != "trainer",
    )


def mismatch_metrics(batch: PackedBatch, logprob_BT: jax.Array) -> dict[str, float]:
    """The sampler's log-probabilities against the trainer's, over the trained tokens of a batch. Collective.

    `logprob_diff_*`: |trainer - sampler| in nats, as the mean, the maximum, and the mean over the contexts of each
    turn, of which those from LAST_TURN on are one. `batch` as packed, on the host; both sides are untruncated.
    """
    mask_BT = np.asarray(batch.mask_BT)
    sampler_X, number_X = (np.asarray(x_BT)[mask_BT] for x_BT in (batch.old_logprob_BT, batch.number_BT))
    trainer_BT = multihost_utils.process_allgather(logprob_BT, tiled=True)
    diff_X = np.abs(trainer_BT[mask_BT] - sampler_X).astype(np.float64)
    turn_X = np.minimum(number_X + 1, LAST_TURN)
    return {
        "logprob_diff_mean": float(diff_X.mean()),
        "logprob_diff_max": float(diff_X.max()),
        **{f"logprob_diff_mean/turn_{turn}": float(diff_X[turn_X == turn].mean()) for turn in np.unique(turn_X)},
    }


def check_offload(config: TrainingConfig, mesh: Mesh) -> None:
    """Raises ValueError if the reference cannot be where the config wants it."""
    device = mesh.devices.flat[0]
    if config.offload_reference and PINNED_HOST not in (memory.kind for memory in device.addressable_memories()):
        raise ValueError(
            f"training.offload_reference needs pinned host memory, which JAX does not offer on {device.device_kind}: "
            "set it to False"
        )


def _move(params: Params, memory_kind: str) -> Params:
    return jax.device_put(params, jax.tree.map(lambda x: x.sharding.with_memory_kind(memory_kind), params))


def resolve_old_logprobs(
    config: TrainingConfig, logprob_fn: LogprobFn, params: Params, batches: Sequence[PackedBatch], first: PackedBatch
) -> tuple[list[PackedBatch], dict[str, float]]:
    """The mini-batches of a step with the old log-probabilities to train against, and metrics.

    A ratio against the sampler's log-probabilities takes differences in rounding for changes of the policy. One against
    the trainer's needs one more forward pass; the mismatch with the sampler is then corrected by weights of the losses,
    min(trainer / sampler, cap): truncated importance sampling (Ionides 2008), applied to sampler and trainer by Yao et
    al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".

    batches: with the sampler's log-probabilities; `first` is the first of them as packed, on the host. `params`: the
    weights that sampled. Metrics, if `config.old_logprobs` is "trainer": `mismatch_metrics`.
    """
    if config.old_logprobs != "trainer":
        return list(batches), {}
    old_logprobs = [logprob_fn(params, batch) for batch in batches]
    resolved = [_with_old_logprobs(config, *pair) for pair in zip(batches, old_logprobs, strict=True)]
    return resolved, mismatch_metrics(first, old_logprobs[0])


@partial(jax.jit, static_argnums=0)
def _with_old_logprobs(config: TrainingConfig, batch: PackedBatch, logprob_BT: jax.Array) -> PackedBatch:
    """The batch with `logprob_BT` as old log-probabilities, and with weights if `config.tis_cap` is set."""
    tis_weight_BT = None
    if config.tis_cap:
        weight_BT = grpo.policy_ratio(jnp.where(batch.mask_BT, logprob_BT - batch.old_logprob_BT, 0))
        tis_weight_BT = jnp.minimum(weight_BT, config.tis_cap)
    resolved = replace(batch, old_logprob_BT=logprob_BT, tis_weight_BT=tis_weight_BT)
    return constrain_rows(resolved)


def _mean_metrics(metrics_by_update: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of a step, as `Trainer.step` describes them."""
    skipped = [metrics.pop("skipped") > 0 for metrics in metrics_by_update]
    # The metrics of a skipped update are not finite and would hide the others.
    applied = [metrics for metrics, skip in zip(metrics_by_update, skipped, strict=True) if not skip]
    first = metrics_by_update[0]
    means = {name: float(np.mean([metrics[name] for metrics in applied or metrics_by_update])) for name in first}
    return means | {"updates": float(len(skipped)), "skipped_updates": float(sum(skipped))}
