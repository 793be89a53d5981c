"""A frozen model that an update compares the policy with: the initial policy, or a teacher."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax

from memsearcher_jax.model.qwen import Params
from memsearcher_jax.training.logprobs import LogprobFn, Targets
from memsearcher_jax.training.packing import PackedBatch

PINNED_HOST = "pinned_host"  # JAX's kind of memory


@dataclass(frozen=True)
class Reference:
    """A frozen model and what it says of the rows."""

    name: str  # "reference" or "teacher", in the progress line
    logprob_fn: LogprobFn
    params: Params  # in compute_dtype, on the devices or in the host's memory

    def score(self, batches: Iterable[PackedBatch]) -> list[PackedBatch]:
        """The batches with what `logprob_fn` computes: log-probabilities, or the most likely tokens."""
        params = _move(self.params, "device")
        unscored: list[PackedBatch] = []
        scores: list[Any] = []
        for batch in batches:  # the next one is made while the devices compute
            unscored.append(batch)
            scores.append(self.logprob_fn(params, batch))
        # A copy of the weights from the host is freed before the first update is dispatched.
        jax.block_until_ready(scores)
        return [_with_scores(batch, score) for batch, score in zip(unscored, scores, strict=True)]

    def offloaded(self) -> Reference:
        """The same with its weights in the host's memory."""
        return replace(self, params=_move(self.params, PINNED_HOST))


def _with_scores(batch: PackedBatch, score: jax.Array | Targets) -> PackedBatch:
    if isinstance(score, Targets):
        return replace(batch, teacher_ids_BTK=score.ids_BTK, teacher_probability_BTK=score.weight_BTK)
    return replace(batch, ref_logprob_BT=score)


def _move(params: Params, memory_kind: str) -> Params:
    return jax.device_put(params, jax.tree.map(lambda x: x.sharding.with_memory_kind(memory_kind), params))
