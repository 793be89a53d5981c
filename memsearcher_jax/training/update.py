"""One optimiser step: a pure, compiled function `(state, batch) -> (state, metrics)`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from memsearcher_jax.model import lora, qwen, sharding
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.qwen import Params
from memsearcher_jax.ops.axes import AXIS_RULES, constrain_rows, psum_grad, shard_map_by_rows
from memsearcher_jax.training import losses, masked, microbatches
from memsearcher_jax.training.config import TrainingConfig, learning_rate_plan
from memsearcher_jax.training.logprobs import TokenScores, token_logprobs
from memsearcher_jax.training.losses import LossFn, Metrics
from memsearcher_jax.training.packing import PackedBatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that an update changes; a pytree."""

    step: jax.Array  # int32 scalar: optimiser steps taken, without skipped ones
    params: Params  # what is trained, in ModelConfig.param_dtype: all weights, or the adapters of LoRA
    opt_state: optax.OptState  # moments have the type and sharding of their parameter


def learning_rate(config: TrainingConfig, number: ArrayLike, training_step: ArrayLike) -> jax.Array:
    """The rate of update `number`, which is in `training_step`, by the plan. None before its end is 0."""
    plan = learning_rate_plan(config)
    warmup = plan.warmup.count
    decay = plan.decay.count
    now = jnp.asarray(number if plan.decay.unit == "updates" else training_step)
    remaining = (warmup + decay - now) / decay if decay else 1
    return plan.peak * jnp.clip(jnp.minimum((now + 1) / max(warmup, 1), remaining), 0, 1)


def make_optimizer(config: TrainingConfig) -> optax.GradientTransformationExtraArgs:
    """AdamW, whose learning rate may need the `training_step` of an update. `make_update` clips the gradients."""

    def init(params: optax.Params) -> optax.ScaleByScheduleState:
        return optax.ScaleByScheduleState(count=jnp.zeros([], jnp.int32))

    def scale(updates: Any, state: Any, params: Any = None, *, training_step: Any = 0) -> Any:
        rate = learning_rate(config, state.count, training_step)
        updates = jax.tree.map(lambda x: (-rate).astype(x.dtype) * x, updates)
        return updates, optax.ScaleByScheduleState(count=state.count + 1)

    return optax.chain(
        optax.scale_by_adam(config.adam_b1, config.adam_b2),
        optax.add_decayed_weights(config.weight_decay),
        optax.GradientTransformationExtraArgs(init, scale),
    )


def abstract_state(model_config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The train state as shapes, types and shardings. Moments are sharded like their parameter, counters replicated."""
    sharding.check_divides(model_config, dict(mesh.shape))
    params = sharding.abstract_arrays(lora.trainable_specs(model_config), mesh)
    replicated = sharding.named_sharding(mesh, ())
    opt_state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda moment, parameter: moment.update(sharding=parameter.sharding),
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda counter: counter.update(sharding=replicated),
    )
    step: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    return TrainState(step, params, opt_state)


def init_state(
    params: Params, model_config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """The state at step 0 of all weights, or of adapters. The first update donates `params`, too."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(model_config, optimizer, mesh))
    params = jax.device_put(params, shardings.params)
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)
    return TrainState(jax.device_put(jnp.int32(0), shardings.step), params, opt_state)


def check_param_dtype(model_config: ModelConfig) -> None:
    """Raises ValueError for weights in bfloat16: the updates of AdamW at 1e-6 are a thousandth of their last bit."""
    if model_config.param_dtype != "float32":
        raise ValueError(
            f"model.param_dtype {model_config.param_dtype} loses nearly all updates to rounding: set it to float32 for "
            "training; matrix products use model.compute_dtype in any case"
        )


def fit_to_mesh(config: TrainingConfig, mesh: Mesh) -> TrainingConfig:
    """The config with the most `grad_accum_steps`, up to its own, that give each device equally many rows per step.

    Raises ValueError, in one line, if the devices cannot share a mini-batch evenly.
    """
    axes = AXIS_RULES["batch"]
    shards = math.prod(mesh.shape[axis] for axis in axes)
    if config.minibatch_rows % shards:
        raise ValueError(
            f"training.minibatch_rows {config.minibatch_rows} does not divide over {shards} devices "
            f"({' x '.join(f'mesh.{axis}' for axis in axes)}): choose a multiple of {shards}"
        )
    device_rows = config.minibatch_rows // shards
    steps = max(steps for steps in range(1, config.grad_accum_steps + 1) if device_rows % steps == 0)
    return replace(config, grad_accum_steps=steps)


def make_update(
    model_config: ModelConfig,
    config: TrainingConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    temperature: float,
    loss_fn: LossFn = losses.grpo_loss,
    with_logprobs: bool = False,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """A compiled `update(state, batch)`, to be called under `jax.set_mesh(mesh)`. The state is donated.

    With LoRA it is `update(state, batch, base)`: the adapters of the state are trained on top of the weights `base`. A
    learning rate that is planned in training steps needs `training_step`, too.

    `batch`: `config.minibatch_rows` packed rows of `config.seq_len`. `temperature`: that of sampling. `with_logprobs`:
    the metrics also hold `logprob_BT`, before the update. Gradients are accumulated over the micro-batches of
    `fit_to_mesh`, with the token weights of the whole batch. Empty micro-batches at the end are not computed; the
    metric `packing_efficiency` is the share of real tokens in the others.

    A gradient that is not finite leaves the state unchanged and sets the metric `skipped` to 1.
    Raises ValueError if the devices cannot share a batch evenly.
    """
    config = fit_to_mesh(config, mesh)
    optimizer = optax.with_extra_args_support(optimizer)
    state_shardings = jax.tree.map(lambda x: x.sharding, abstract_state(model_config, optimizer, mesh))
    axes_BT = ("batch", None)
    param_axes = jax.tree.map(lambda spec: spec.axes, lora.trainable_specs(model_config))
    base_axes = qwen.param_axes(model_config) if model_config.lora_rank else None

    def local_gradient(
        params: Params, batch: PackedBatch, weight_BT: jax.Array, base: Params | None
    ) -> tuple[Params, TokenScores]:
        """(gradient of the local parameter shards, scores of the local rows)."""
        merged = None if base is None else lora.merge(base, params, model_config)

        def loss(params: Params, batch: PackedBatch, weight_BT: jax.Array):
            weights = params if merged is None else merged | {"adapters": params["layers"]}
            scores = token_logprobs(weights, model_config, batch, chunk=config.logit_chunk, temperature=temperature)
            return loss_fn(config, scores, batch, weight_BT)[0], scores

        def accumulate(total: Params, microbatch: tuple[PackedBatch, jax.Array]):
            gradient_fn = jax.grad(loss, has_aux=True)
            gradient, scores = gradient_fn(params, *microbatch)
            return jax.tree.map(lambda total, x: total + x.astype(total.dtype), total, gradient), scores

        no_gradient = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        batch_nBT, weight_nBT = microbatches.split((batch, weight_BT), config.grad_accum_steps)
        count = microbatches.num_nonempty(batch_nBT.segment_BT)
        zeros_nBT = jnp.zeros(weight_nBT.shape, jnp.float32)
        no_scores = TokenScores(zeros_nBT, zeros_nBT, zeros_nBT)
        gradient, scores = microbatches.scan_first(accumulate, no_gradient, (batch_nBT, weight_nBT), no_scores, count)
        gradient = jax.tree.map(psum_grad, gradient, param_axes)
        return jax.tree.map(lambda x, param: x.astype(param.dtype), gradient, params), microbatches.merge(scores)

    def apply_gradient(
        state: TrainState, gradient: Params, grad_norm: jax.Array, training_step: ArrayLike
    ) -> TrainState:
        # optax.clip_by_global_norm would compute the norm again, and XLA would keep its result as a second gradient.
        scale = jnp.minimum(1, config.max_grad_norm / grad_norm)
        gradient = jax.tree.map(lambda x: (x * scale).astype(x.dtype), gradient)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params, training_step=training_step)
        params = cast(Params, optax.apply_updates(state.params, updates))
        return TrainState(state.step + 1, params, opt_state)

    def update(
        state: TrainState, batch: PackedBatch, base: Params | None = None, training_step: ArrayLike = 0
    ) -> tuple[TrainState, Metrics]:
        batch = constrain_rows(batch)
        weight_BT = masked.token_weights(
            batch.count_BT, config.aggregate, batch.segment_BT, norm_tokens=config.norm_tokens
        )
        if batch.kind_weight_BT is not None:
            weight_BT *= batch.kind_weight_BT

        in_axes = (param_axes, axes_BT, axes_BT, base_axes)
        out_axes = (param_axes, axes_BT)
        gradient_fn = shard_map_by_rows(local_gradient, in_axes, out_axes)
        gradient, scores = gradient_fn(state.params, batch, weight_BT, base)
        grad_norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(grad_norm)
        # Not jnp.where: on a CPU it keeps most of the old state in memory next to the new one.
        new_state = jax.lax.cond(
            finite, apply_gradient, lambda state, *_: state, state, gradient, grad_norm, training_step
        )

        _, metrics = loss_fn(config, scores, batch, weight_BT)
        if with_logprobs:
            metrics["logprob_BT"] = scores.logprob_BT
        computed = microbatches.num_nonempty(microbatches.split(batch.segment_BT, config.grad_accum_steps))
        computed_tokens = computed * (weight_BT.size // config.grad_accum_steps)
        return new_state, metrics | {
            "grad_norm": grad_norm,
            "param_norm": optax.tree.norm(new_state.params),
            "learning_rate": learning_rate(config, state.step, training_step),
            "skipped": 1 - finite.astype(jnp.float32),
            "packing_efficiency": jnp.sum(batch.segment_BT > 0) / jnp.maximum(computed_tokens, 1),
        }

    # Without out_shardings the compiler may choose others, and the second call compiles again.
    return jax.jit(update, donate_argnames="state", out_shardings=(state_shardings, None))
