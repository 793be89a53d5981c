"""From samples to a new state: rows, reference log-probabilities, optimiser steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from memsearcher_jax.config import RunConfig
from memsearcher_jax.model import sharding
from memsearcher_jax.model.axes import spec
from memsearcher_jax.rl.alarms import SKIPPED, SKIPPED_LAST
from memsearcher_jax.training import objectives, update
from memsearcher_jax.training.logprob import make_reference
from memsearcher_jax.training.old_logprobs import settle_old_logprobs
from memsearcher_jax.training.rows import Rows, Sample, pack
from memsearcher_jax.training.update import TrainState

OBJECTIVES = {"grpo": objectives.multi_context_grpo, "demonstrations": objectives.supervised}


@dataclass(frozen=True)
class Trainer:
    """The compiled programs of training and the frozen weights that they compare with."""

    config: RunConfig
    mesh: Mesh
    update: Callable[[TrainState, Rows], tuple[TrainState, dict]]
    reference: Callable[[dict, Rows], jax.Array]
    reference_params: dict | None  # in compute_dtype; None where kl_coefficient is 0

    def learn(
        self, state: TrainState, samples: Sequence[Sample], rng: np.random.Generator, tell: Callable[[str], None]
    ) -> tuple[TrainState, dict[str, float]]:
        """One pass over the samples, a mini-batch at a time; `state` is given up, and `tell` hears how far it is.

        Returns the new state and the numbers: means over the mini-batches that counted, but for
        `logprob_difference_*`, which are the first one's, before the weights moved away from those that sampled, and
        always between sampler and trainer. `updates` are the mini-batches, `skipped` those whose gradient was not
        finite, `skipped_last` such ones at the end. Without a sample nothing moves.
        """
        if not samples:
            return state, {"updates": 0.0}
        settings = self.config.training
        rows = self._pack(samples, rng)
        numbers = []
        with jax.set_mesh(self.mesh):
            placed = [self._place(batch) for batch in rows.split(settings.rows_per_update)]
            batches, found = settle_old_logprobs(settings, self.reference, state.params, placed)
            for number, batch in enumerate(batches, start=1):
                tell(f"mini-batch {number}/{len(batches)}")
                if self.reference_params is not None:
                    batch = replace(batch, ref_logprob_BT=self.reference(self.reference_params, batch))
                state, metrics = self.update(state, batch)
                numbers.append({name: float(value) for name, value in jax.device_get(metrics).items()})
        skipped = [one.pop("skipped") > 0 for one in numbers]
        # What a skipped one measured is not finite and would hide the others.
        counted = [one for one, lost in zip(numbers, skipped, strict=True) if not lost] or numbers
        means = {name: float(np.mean([one[name] for one in counted])) for name in numbers[0]}
        means |= {name: value for name, value in numbers[0].items() if name.startswith("logprob_difference")}
        last = len(skipped) if all(skipped) else skipped[::-1].index(False)
        counts = {"updates": float(len(numbers)), SKIPPED: float(sum(skipped)), SKIPPED_LAST: float(last)}
        return state, means | found | counts

    def likelihood(self, params: dict, samples: Sequence[Sample], rng: np.random.Generator) -> np.ndarray:
        """float64 [len(samples)], in no fixed order: the probability of each sample's trained tokens together."""
        settings = self.config.training
        rows = self._pack(samples, rng)
        likelihoods = []
        with jax.set_mesh(self.mesh):
            for batch in rows.split(settings.rows_per_update):
                placed = self._place(batch)
                logprob_BT = np.where(batch.mask_BT, jax.device_get(self.reference(params, placed)), 0)
                for segment_T, logprob_T in zip(batch.segment_BT, logprob_BT, strict=True):
                    likelihoods.append(np.exp(np.bincount(segment_T, weights=logprob_T)[1:]))
        return np.concatenate(likelihoods)

    def _pack(self, samples: Sequence[Sample], rng: np.random.Generator) -> Rows:
        settings = self.config.training
        return pack(samples, settings.row_tokens, settings.rows_per_update, rng, micro_batches=settings.accumulate)

    def _place(self, rows: Rows) -> Rows:
        """Rows that every host has, spread over the devices of all: each takes its own."""
        lies = NamedSharding(self.mesh, spec(("batch", None)))
        return jax.tree.map(lambda x_BT: jax.make_array_from_callback(x_BT.shape, lies, x_BT.__getitem__), rows)


def make_trainer(config: RunConfig, mesh: Mesh, start_params: dict) -> Trainer:
    """A trainer that holds the policy to `start_params`, which it copies."""
    config = replace(config, training=update.on_mesh(config.training, mesh))
    model = sharding.with_kernels(config.model, mesh)
    settings, temperature = config.training, config.sampling.temperature
    rows_at_once = settings.rows_per_update // settings.accumulate
    frozen = None
    if settings.kl_coefficient:
        frozen = sharding.reshard(
            start_params, sharding.param_shardings(config.model, mesh), config.model.compute_dtype
        )
    with jax.set_mesh(mesh):
        return Trainer(
            config,
            mesh,
            update.make_update(
                model,
                settings,
                update.make_optimizer(settings),
                mesh,
                temperature=temperature,
                objective=OBJECTIVES[config.rl.method],
            ),
            make_reference(model, chunk=settings.logit_chunk, temperature=temperature, rows_at_once=rows_at_once),
            frozen,
        )
