"""One training step: pack examples, compute old and reference log-probabilities, take the optimiser steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.stages import Wrapped

from memsearcher_jax.model import lora, sharding
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.qwen import Params
from memsearcher_jax.ops.kernel_errors import way_around_kernels
from memsearcher_jax.training import losses, update
from memsearcher_jax.training.config import TeacherConfig, TrainingConfig, learning_rate_plan, with_plan
from memsearcher_jax.training.distillation import Distillation
from memsearcher_jax.training.logprobs import LogprobFn, make_logprob_fn
from memsearcher_jax.training.losses import Metrics
from memsearcher_jax.training.objective import Grpo, Objective
from memsearcher_jax.training.old_logprobs import mismatch_metrics, recompute_old_logprobs
from memsearcher_jax.training.packing import PackedBatch, PackedRows, TrainingExample, merge_equal, plan_rows
from memsearcher_jax.training.reference import PINNED_HOST, Reference
from memsearcher_jax.training.update import TrainState

NO_TEACHER = TeacherConfig()
LOSS_FNS = {"grpo": losses.grpo_loss, "sft": losses.sft_loss}


@dataclass(frozen=True)
class Trainer:
    """The compiled training functions and the frozen weights."""

    config: TrainingConfig
    mesh: Mesh
    objective: Objective
    update: Callable[..., tuple[TrainState, Metrics]]
    logprob_fn: LogprobFn
    make_update: Callable[[TrainingConfig], Callable[..., tuple[TrainState, Metrics]]]
    reference: Reference | None = None  # None if neither a KL term nor the objective needs it
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
        """Trains on all examples once, one mini-batch at a time.

        `state` is donated; `notify` receives the progress. `training_step`: steps of the run before this one, by which
        the learning rate may be planned. Equal examples, which a policy of low entropy often samples, are computed once
        and count as often as they are. The rows of a mini-batch are made while the devices compute the one before.

        Returns the new state and metrics, which are means over the mini-batches that were not skipped, except those of
        `mismatch_metrics`, which are of the first mini-batch, before any update, and those of the objective.
        `skipped_updates` counts the mini-batches with a gradient that was not finite.
        """
        if not examples:
            return state, {"updates": 0.0}
        rows = self._plan(merge_equal(self.objective.keep(examples)), rng)
        with jax.set_mesh(self.mesh), way_around_kernels("model.attention"):
            batches = self._batches(rows)
            if self.config.old_logprobs == "trainer":
                batches = recompute_old_logprobs(self.config, self.logprob_fn, self.weights(state), batches)
            if self.reference:
                notify(self.reference.name)
                batches = self.reference.score(batches)
            state, steps = self._update_on_each(state, batches, rows.minibatches, notify, training_step)
            metrics = _mean_metrics([_floats(step.update) for step in steps])
            metrics |= _means([jax.device_get(step.objective) for step in steps])
            if steps[0].logprob_BT is not None:
                metrics |= mismatch_metrics(rows.of_minibatch(0), steps[0].logprob_BT)
        if not metrics["learning_rate"]:
            warnings.warn(  # one text is shown once
                "training changes nothing any more: the learning rate is 0, it "
                f"{learning_rate_plan(self.config)}; set training.decay_steps to end, or to a longer time",
                stacklevel=2,
            )
        return state, self.objective.finish(metrics)

    def sequence_logprobs(
        self, params: Params, examples: Sequence[TrainingExample], rng: np.random.Generator
    ) -> np.ndarray:
        """float64 [len(examples)], in no fixed order: the log-probability of all the trained tokens of each example.

        Collective.
        """
        logprobs = []
        rows = self._plan(examples, rng)
        with jax.set_mesh(self.mesh):
            for number in range(rows.minibatches):
                batch = rows.of_minibatch(number).batch()
                logprob_BT = multihost_utils.process_allgather(self.logprob_fn(params, self._shard(batch)), tiled=True)
                for segment_T, logprob_T in zip(batch.segment_BT, np.where(batch.mask_BT, logprob_BT, 0), strict=True):
                    logprobs.append(np.bincount(segment_T, weights=logprob_T)[1:])
        return np.concatenate(logprobs)

    def _plan(self, examples: Sequence[TrainingExample], rng: np.random.Generator) -> PackedRows:
        config = self.config
        return plan_rows(
            examples,
            config.seq_len,
            config.minibatch_rows,
            rng,
            microbatches=config.grad_accum_steps,
            minibatch_contexts=config.minibatch_contexts,
        )

    def _batches(self, rows: PackedRows) -> Iterator[PackedBatch]:
        """Yields the mini-batches, each of which is made when it is asked for."""
        for number in range(rows.minibatches):
            rows_of_minibatch = rows.of_minibatch(number)
            batch = self.objective.make_batch(rows_of_minibatch)
            if self.config.memory_weight != 1:
                weights = np.where(rows_of_minibatch.memory_mask(), self.config.memory_weight, 1)
                batch = replace(batch, kind_weight_BT=weights.astype(np.float32))
            yield self._shard(batch)

    def _shard(self, batch: PackedBatch) -> PackedBatch:
        """Shards a batch, of which every host has a copy, over the devices of all hosts."""
        batch_sharding = sharding.named_sharding(self.mesh, ("batch", None))
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, batch_sharding, x.__getitem__), batch)

    def _update_on_each(
        self,
        state: TrainState,
        batches: Iterable[PackedBatch],
        count: int,
        notify: Callable[[str], None],
        training_step: int,
    ) -> tuple[TrainState, list[_MinibatchStep]]:
        on_devices: list[_MinibatchStep] = []
        for number, batch in enumerate(batches, start=1):
            prepared, objective_metrics = self.objective.prepare(batch)
            # This batch was made while the update before it was running. A second one is not dispatched before that
            # has ended, because `notify` says which one is under way.
            jax.block_until_ready(on_devices[-1:])
            notify(f"mini-batch {number}/{count}")
            state, metrics = self.update(state, prepared, self.base, np.int32(training_step))
            logprob_BT = metrics.pop("logprob_BT", None)
            if self.config.old_logprobs == "trainer":
                logprob_BT = batch.old_logprob_BT
            is_first = number == 1
            on_devices.append(_MinibatchStep(metrics, objective_metrics, logprob_BT if is_first else None))
        return state, on_devices


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _MinibatchStep:
    """What one mini-batch of a step leaves, on the devices."""

    update: Metrics
    objective: Metrics
    logprob_BT: jax.Array | None  # the trainer's, before the first update; None for other mini-batches


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
    base = initial_params if model_config.lora_rank else None
    merge = merge_program(model_config, mesh) if base else None
    model_config = sharding.select_attention(model_config, mesh, config.seq_len)
    logprob_fn = make_logprob_fn(model_config, config, temperature=temperature)

    reference = None
    if teacher_model:
        teacher_config, teacher_params = teacher_model
        teacher_config = sharding.select_attention(teacher_config, mesh, config.seq_len)
        teacher_fn = make_logprob_fn(teacher_config, config, temperature=temperature, top_k=teacher.top_k)
        reference = Reference("teacher", teacher_fn, teacher_params)
    elif config.kl_coefficient:
        cast = sharding.cast_program(sharding.param_shardings(model_config, mesh))
        initial_copy = base or cast(initial_params, dtype=model_config.compute_dtype)
        reference = Reference("reference", logprob_fn, initial_copy)
    if reference and reference.params is not base and config.offload_reference:
        reference = reference.offloaded()

    objective = make_objective(config, teacher)
    make_update = partial(update_program, model_config, mesh, method, temperature)
    return Trainer(config, mesh, objective, make_update(config), logprob_fn, make_update, reference, base, merge)


def merge_program(model_config: ModelConfig, mesh: Mesh) -> Wrapped:
    """(frozen weights, adapters) -> the weights with the adapters added, sharded like the frozen ones."""
    shardings = sharding.param_shardings(model_config, mesh)
    return jax.jit(partial(lora.merge, config=model_config), out_shardings=shardings)


def make_objective(config: TrainingConfig, teacher: TeacherConfig) -> Objective:
    """The one that `training.objective` names."""
    if config.objective == "grpo":
        return Grpo()
    return Distillation(teacher, keep_rewards=config.objective == "grpo+distill")


def check_offload(config: TrainingConfig, mesh: Mesh) -> None:
    """Raises ValueError if the reference cannot be where the config wants it."""
    device = mesh.devices.flat[0]
    if config.offload_reference and PINNED_HOST not in (memory.kind for memory in device.addressable_memories()):
        raise ValueError(
            f"training.offload_reference needs pinned host memory, which JAX does not offer on {device.device_kind}: "
            "set it to False"
        )


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


def _floats(metrics: Metrics) -> dict[str, float]:
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


def _mean_metrics(metrics_by_update: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The means over the updates that were not skipped, and how many there were."""
    # The metrics of a skipped update are not finite and would hide the others.
    applied = [metrics for metrics in metrics_by_update if not metrics["skipped"]]
    means = _means(applied or metrics_by_update)
    del means["skipped"]
    updates = len(metrics_by_update)
    return means | {"updates": float(updates), "skipped_updates": float(updates - len(applied))}


def _means(metrics_by_minibatch: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = metrics_by_minibatch[0]
    return {name: float(np.mean([metrics[name] for metrics in metrics_by_minibatch])) for name in names}
