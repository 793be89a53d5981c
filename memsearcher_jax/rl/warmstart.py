"""Supervised steps on lessons: how a policy comes to know the format before rewards can teach it anything.

1. draw the lessons of the step, with names that nobody has seen: what a scripted agent does, errors included, and
   exercises in what its doings alone teach late;
2. pack all that fit a row into rows and update, a mini-batch of rows at a time;
3. every so often measure, on lessons that are never learnt from, how surely the model copies: the loss does not tell.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from memsearcher_jax.report.metrics import Metrics, MetricsWriter
from memsearcher_jax.report.progress import Progress
from memsearcher_jax.rl import build
from memsearcher_jax.rl.keys import numpy_rng
from memsearcher_jax.rl.phases import Phases
from memsearcher_jax.rl.start import Start
from memsearcher_jax.rl.stream_lessons import StreamLessons
from memsearcher_jax.rl.world_lessons import WorldLessons
from memsearcher_jax.training.checkpoint import Checkpoints
from memsearcher_jax.training.rows import Sample


class Lessons(Protocol):
    """What is taught; for each kind of workflow there is one."""

    def of_step(self, step: int) -> tuple[list[Sample], Metrics]:
        """The samples of a step, the same whenever it is asked for, and numbers about them."""

    def measured(self) -> dict[str, list[Sample]]:
        """By name: samples that no step holds, with the mask on what the model should be sure of."""


def open_lessons(run: build.Run) -> Lessons:
    """The lessons for the run's workflow."""
    return StreamLessons(run) if run.config.agent.workflow == "memalpha" else WorldLessons(run)


def train(run: build.Run, start: Start, out: Path, writer: MetricsWriter, progress: Progress) -> Metrics:
    """Goes on from `start` to step `rl.steps`; returns the last step's numbers. Everything is written under `out`."""
    config, rl = run.config, run.config.rl
    lessons = open_lessons(run)
    slots = {slot: fitting for slot, held in lessons.measured().items() if (fitting := _fitting(run, held))}
    trainer, state = start.trainer, start.state
    numbers: Metrics = {}
    with Checkpoints(out / "checkpoints", keep=rl.keep_checkpoints) as checkpoints:
        for step in range(start.step, rl.steps):
            phases = Phases(progress.activity)
            with phases("demonstrate"):
                drawn, numbers = lessons.of_step(step)
                samples = _fitting(run, drawn)
            with phases("update"):
                state, learned = trainer.learn(state, samples, numpy_rng(config.seed, "rows", step), progress.activity)
            numbers = numbers | learned | {"too_long": float(len(drawn) - len(samples))}
            if (step + 1) % config.demonstrations.measure_every == 0 or step + 1 == rl.steps:
                with phases("measure"):
                    for slot, filled in slots.items():
                        copied = trainer.likelihood(state.params, filled, numpy_rng(config.seed, slot, step))
                        numbers[f"copied/{slot}"] = float(copied.mean())
            with phases("write"):
                if (step + 1) % rl.checkpoint_every == 0 or step + 1 == rl.steps:
                    checkpoints.save(step + 1, state, config.model, {"position": 0})
            numbers |= phases.metrics
            writer.write(step, numbers)
            progress.advance(numbers)
    return numbers


def _fitting(run: build.Run, samples: list[Sample]) -> list[Sample]:
    """Those that fit a row; who searches in vain again and again has a long history."""
    return [sample for sample in samples if len(sample.ids) <= run.config.training.row_tokens]
