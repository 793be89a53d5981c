"""What the advantage of a token is: `training.objective` names an objective, and `make_trainer` chooses it.

`Grpo` is here; what a teacher adds is in `distillation.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import jax

from memsearcher_jax.training.packing import PackedBatch, PackedRows, TrainingExample


class Objective(Protocol):
    """What an objective does with the examples of a step and with each of its mini-batches."""

    def keep(self, examples: Sequence[TrainingExample]) -> Sequence[TrainingExample]:
        """What it keeps of the examples, before equal ones are merged."""
        ...

    def make_batch(self, rows: PackedRows) -> PackedBatch:
        """The arrays of a mini-batch on the host, with those that the objective adds."""
        ...

    def prepare(self, batch: PackedBatch) -> tuple[PackedBatch, dict[str, jax.Array]]:
        """The batch on the devices as the loss needs it, and metrics to average over the mini-batches.

        The batch has the old log-probabilities, and those of the reference or the teacher.
        """
        ...

    def finish(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics of the step, from means over its mini-batches."""
        ...


class Grpo:
    """Each token has the advantage of its trajectory, which packing has written into the rows."""

    def keep(self, examples: Sequence[TrainingExample]) -> Sequence[TrainingExample]:
        return examples

    def make_batch(self, rows: PackedRows) -> PackedBatch:
        return rows.batch()

    def prepare(self, batch: PackedBatch) -> tuple[PackedBatch, dict[str, jax.Array]]:
        return batch, {}

    def finish(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return dict(metrics)
