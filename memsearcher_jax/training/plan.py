"""The large programs of training, lowered for devices that need not be there."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.stages import Lowered

from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.training import objectives, update
from memsearcher_jax.training.config import TrainingConfig
from memsearcher_jax.training.logprob import make_reference
from memsearcher_jax.training.objectives import Objective
from memsearcher_jax.training.rows import Rows


def lowered_update(
    model: ModelConfig,
    settings: TrainingConfig,
    mesh: Mesh,
    *,
    temperature: float,
    objective: Objective = objectives.multi_context_grpo,
) -> Lowered:
    """The optimiser step on one mini-batch. `model` as `sharding.with_kernels` gives it."""
    # Outside of the mesh: optax makes numbers to find out what its state holds, and there is nothing to make them on.
    optimizer = update.make_optimizer(settings)
    state = update.abstract_state(model, optimizer, mesh)
    step = update.make_update(model, settings, optimizer, mesh, temperature=temperature, objective=objective)
    with jax.set_mesh(mesh):
        return step.lower(state, abstract_rows(settings, mesh, reference=bool(settings.kl_coefficient)))


def lowered_scoring(
    model: ModelConfig, settings: TrainingConfig, mesh: Mesh, *, temperature: float
) -> Iterator[tuple[str, Lowered]]:
    """(name, program) of each scoring of a mini-batch that comes before the step; there may be none."""
    score = make_reference(
        model,
        chunk=settings.logit_chunk,
        temperature=temperature,
        rows_at_once=settings.rows_per_update // settings.accumulate,
    )
    with jax.set_mesh(mesh):
        rows = abstract_rows(settings, mesh)
        if settings.kl_coefficient:
            yield "reference", score.lower(abstract_reference(model, mesh), rows)
        if settings.old_logprobs != "sampler":
            yield "old log-probabilities", score.lower(update.abstract_params(model, mesh), rows)


def abstract_reference(model: ModelConfig, mesh: Mesh) -> dict:
    """The frozen weights as shapes, types and shardings."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, model.compute_dtype, sharding=x.sharding),
        update.abstract_params(model, mesh),
    )


def abstract_rows(settings: TrainingConfig, mesh: Mesh, *, reference: bool = False) -> Rows:
    """A mini-batch likewise, with reference log-probabilities or before it has them."""
    shape, lies = (settings.rows_per_update, settings.row_tokens), sharding.named_sharding(mesh, ("batch", None))
    whole, truth, number = (jax.ShapeDtypeStruct(shape, x, sharding=lies) for x in (jnp.int32, jnp.bool_, jnp.float32))
    return Rows(
        ids_BT=whole,
        position_BT=whole,
        segment_BT=whole,
        mask_BT=truth,
        advantage_BT=number,
        old_logprob_BT=number,
        ref_logprob_BT=number if reference else None,
        importance_BT=number if reference and settings.importance_cap else None,
    )
