"""Supervised steps on demonstrations: how a policy comes to know the format before rewards can teach it anything.

1. make a world that nobody has seen, and let the scripted agent answer its questions, errors included;
2. add exercises in copying, which the demonstrations alone teach late;
3. pack all into rows and update, a mini-batch of rows at a time;
4. every so often measure, in other worlds, how surely the model copies each kind of name: the loss does not tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from memsearcher_jax.agent.types import Trajectory
from memsearcher_jax.config import RunConfig
from memsearcher_jax.data.demonstrator import Errors
from memsearcher_jax.data.world import World
from memsearcher_jax.report.metrics import Metrics, MetricsWriter
from memsearcher_jax.report.progress import Progress
from memsearcher_jax.rl import build, score
from memsearcher_jax.rl.demonstrate import FIRST_WORLD, SLOTS, Stage, demonstrate, open_stage, samples_of, slot_samples
from memsearcher_jax.rl.exercises import copies, recitations
from memsearcher_jax.rl.keys import numpy_rng
from memsearcher_jax.rl.phases import Phases
from memsearcher_jax.rl.start import Start
from memsearcher_jax.training.checkpoint import Checkpoints
from memsearcher_jax.training.rows import Sample

HELD_OUT = 999  # seed of the world in which copying is measured
WORLDS_OF_A_SEED = 1_000_000


def train(run: build.Run, start: Start, out: Path, writer: MetricsWriter, progress: Progress) -> Metrics:
    """Goes on from `start` to step `rl.steps`; returns the last step's numbers. Everything is written under `out`."""
    config, rl = run.config, run.config.rl
    settings = config.demonstrations
    errors = Errors(settings.answer_early, settings.wrong_query, settings.bad_memory)
    faultless = _demonstrations(run, _stage(config, HELD_OUT), Errors(0, 0, 0), 0)
    slots = {slot: slot_samples(faultless, slot, run.tokenizer) for slot in SLOTS}
    slots = {slot: filled for slot, filled in slots.items() if filled}  # who has no memory writes no fact into it
    trainer, state = start.trainer, start.state
    numbers: Metrics = {}
    with Checkpoints(out / "checkpoints", keep=rl.keep_checkpoints) as checkpoints:
        for step in range(start.step, rl.steps):
            phases = Phases(progress.activity)
            with phases("demonstrate"):
                stage = _stage(config, FIRST_WORLD + config.seed * WORLDS_OF_A_SEED + step)
                trajectories = _demonstrations(run, stage, errors, step)
            with phases("update"):
                samples = samples_of(trajectories) + _exercises(run, stage.world, step)
                state, learned = trainer.learn(state, samples, numpy_rng(config.seed, "rows", step), progress.activity)
            numbers = score.summarise([score.scored(one) for one in trajectories]) | learned
            if (step + 1) % settings.measure_every == 0 or step + 1 == rl.steps:
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


def _stage(config: RunConfig, seed: int) -> Stage:
    return open_stage(replace(config.data.world, seed=seed), config.retrieval)


def _exercises(run: build.Run, world: World, step: int) -> list[Sample]:
    settings, rng = run.config.demonstrations, numpy_rng(run.config.seed, "exercises", step)
    return [
        *copies(rng, run.tokenizer, settings.copies),
        *recitations(rng, run.tokenizer, world, settings.recitations),
    ]


def _demonstrations(run: build.Run, stage: Stage, errors: Errors, step: int) -> Sequence[Trajectory]:
    """Of `rl.problems` questions of the stage's world, drawn without repetition."""
    config = run.config
    rng = numpy_rng(config.seed, "demonstrate", step)
    problems = (*stage.world.train, *stage.world.test)
    chosen = rng.choice(len(problems), min(config.rl.problems, len(problems)), replace=False)
    make_workflow = build.workflow_maker(config.agent, run.prompts, run.tokenizer)
    return demonstrate(stage, [problems[row] for row in chosen], errors, make_workflow, run.tokenizer, rng)
