"""One optimiser step of multi-context GRPO: a pure, compiled function `(state, batch) -> (state, metrics)`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.model.axes import RULES, by_rows, summed
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.training import masked, objectives
from memsearcher_jax.training.config import TrainingConfig
from memsearcher_jax.training.logprob import token_logprobs
from memsearcher_jax.training.objectives import Metrics, Objective
from memsearcher_jax.training.parts import filled_parts, merge_rows, scan_leading, split_rows
from memsearcher_jax.training.rows import Rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that an update changes; a pytree."""

    step: jax.Array  # int32 scalar: optimiser steps taken; a skipped one does not count
    params: dict  # in ModelConfig.param_dtype
    opt_state: Any  # optax's; moments have the type and sharding of the parameter they belong to


def learning_rate(config: TrainingConfig) -> optax.Schedule:
    """Steps taken -> rate. The rise ends at step `warmup_steps`; the first step already moves, and so does the last."""
    rise, fall = max(config.warmup_steps, 1), config.decay_steps

    def rate(step: jax.Array) -> jax.Array:
        left = (config.warmup_steps + fall - step) / fall if fall else 1
        return config.learning_rate * jnp.clip(jnp.minimum((step + 1) / rise, left), 0, 1)

    return rate


def make_optimizer(config: TrainingConfig) -> optax.GradientTransformation:
    """AdamW, of gradients that `make_update` has clipped."""
    return optax.adamw(learning_rate(config), b1=config.adam_b1, b2=config.adam_b2, weight_decay=config.weight_decay)


def abstract_params(model_config: ModelConfig, mesh: Mesh) -> dict:
    """The parameters as shapes, types and shardings, without memory: to restore into, or to compile for."""
    return jax.tree.map(_placed, qwen.declared(model_config), sharding.param_shardings(model_config, mesh))


def abstract_state(model_config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The whole state likewise. A moment lies where its parameter does; counters are on every device."""
    params = abstract_params(model_config, mesh)
    replicated = sharding.named_sharding(mesh, ())
    opt_state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda moment, parameter: _placed(moment, parameter.sharding),
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda counter: _placed(counter, replicated),
    )
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated), params, opt_state)


def init_state(
    params: dict, model_config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """The state at step 0. It takes `params` over: the first update donates their memory, so copy what must stay."""
    shardings = _shardings(abstract_state(model_config, optimizer, mesh))
    params = jax.device_put(params, shardings.params)
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)
    return TrainState(jax.device_put(jnp.int32(0), shardings.step), params, opt_state)


def on_mesh(config: TrainingConfig, mesh: Mesh) -> TrainingConfig:
    """The same settings with no more micro-batches than give every device a whole number of rows in each.

    Raises ValueError, in one line, if the devices cannot share a batch evenly.
    """
    parts = math.prod(mesh.shape[axis] for axis in RULES["batch"])
    if config.rows_per_update % parts:
        raise ValueError(
            f"training.rows_per_update {config.rows_per_update} does not divide over {parts} devices "
            f"({' x '.join(f'mesh.{axis}' for axis in RULES['batch'])}): choose a multiple of {parts}"
        )
    rows = config.rows_per_update // parts  # of a device
    return replace(config, accumulate=max(n for n in range(1, config.accumulate + 1) if rows % n == 0))


def make_update(
    model_config: ModelConfig,
    config: TrainingConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    temperature: float,
    objective: Objective = objectives.multi_context_grpo,
) -> Callable[[TrainState, Rows], tuple[TrainState, Metrics]]:
    """A compiled `update(state, batch)`, to be called under `jax.set_mesh(mesh)`; the state's memory is donated.

    `batch` is `config.rows_per_update` packed rows of `config.row_tokens`. `temperature` is the one that the tokens
    were drawn at. `objective` makes their log-probabilities a loss, over the trained tokens with `config.aggregate`.
    The batch goes through the model in the micro-batches of `on_mesh`; each token keeps its weight in the whole batch,
    so their number changes nothing but rounding. Those at the end that hold nothing are not computed; the metric
    `row_fill` is the share of real tokens in those that are.

    A gradient that is not finite changes nothing in the state and sets the metric `skipped` to 1.
    Raises ValueError if the devices cannot share a batch evenly.
    """
    config = on_mesh(config, mesh)
    state_shardings = _shardings(abstract_state(model_config, optimizer, mesh))
    weight_axes, axes_BT = qwen.weight_axes(model_config), ("batch", None)

    def gradient_here(params: dict, batch: Rows, weight_BT: jax.Array):
        """(gradient of these parts of the weights, scores of these rows): the loss is a sum over rows."""

        def loss(params: dict, rows: Rows, weight_BT: jax.Array):
            scores = token_logprobs(params, model_config, rows, chunk=config.logit_chunk, temperature=temperature)
            return objective(config, *scores, rows, weight_BT)[0], scores

        def accumulate(gradient: dict, micro: tuple[Rows, jax.Array]):
            part, scores = jax.grad(loss, has_aux=True)(params, *micro)
            return jax.tree.map(lambda so_far, x: so_far + x.astype(so_far.dtype), gradient, part), scores

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        parts = split_rows((batch, weight_BT), config.accumulate)
        gradient, scores = scan_leading(accumulate, zeros, parts, filled_parts(parts[0].segment_BT))
        gradient = jax.tree.map(summed, gradient, weight_axes)
        return jax.tree.map(lambda x, weight: x.astype(weight.dtype), gradient, params), merge_rows(scores)

    def step(state: TrainState, gradient: dict, grad_norm: jax.Array) -> TrainState:
        # Not by optax.clip_by_global_norm: it divides each number, which XLA does once for all who read it, into a
        # second gradient; and it takes the norm again.
        scale = jnp.minimum(1, config.max_grad_norm / grad_norm)
        gradient = jax.tree.map(lambda x: (x * scale).astype(x.dtype), gradient)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state)

    def update(state: TrainState, batch: Rows) -> tuple[TrainState, Metrics]:
        if jax.sharding.get_abstract_mesh().empty:
            raise ValueError("the update was called without a mesh: call it under jax.set_mesh")
        batch = jax.tree.map(lambda x: sharding.constrain(x, axes_BT), batch)
        weight_BT = masked.token_weights(
            batch.mask_BT, config.aggregate, batch.segment_BT, norm_tokens=config.norm_tokens
        )

        differentiate = by_rows(gradient_here, (weight_axes, axes_BT, axes_BT), (weight_axes, axes_BT))
        gradient, scores = differentiate(state.params, batch, weight_BT)
        grad_norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(grad_norm)
        # A branch, because a choice for each number keeps most of the old state beside the new one on a CPU.
        new_state = jax.lax.cond(finite, step, lambda state, *_: state, state, gradient, grad_norm)

        _, metrics = objective(config, *scores, batch, weight_BT)
        filled = filled_parts(split_rows(batch.segment_BT, config.accumulate))
        metrics |= {
            "grad_norm": grad_norm,
            "param_norm": optax.tree.norm(new_state.params),
            "learning_rate": learning_rate(config)(state.step),
            "skipped": 1 - finite.astype(jnp.float32),
            "row_fill": jnp.sum(batch.segment_BT > 0) / jnp.maximum(filled * (weight_BT.size // config.accumulate), 1),
        }
        return new_state, metrics

    # Pinned, or the compiler may return a layout of its own choice and the second call compiles again.
    return jax.jit(update, donate_argnames="state", out_shardings=(state_shardings, None))


def _placed(x: qwen.Weight | jax.ShapeDtypeStruct, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def _shardings(abstract: TrainState) -> TrainState:
    """The same tree with a sharding in place of each array."""
    return jax.tree.map(lambda x: x.sharding, abstract)
