"""Supervised steps on demonstrations: how a policy comes to know the format before rewards can teach it anything.

1. make a world that nobody has seen, and let the scripted agent answer its questions, errors included, with a memory
   and, if that is wished, others of them with the whole history: one start then serves both workflows;
2. add exercises in what the demonstrations alone teach late;
3. pack all into rows and update, a mini-batch of rows at a time;
4. every so often measure, in other worlds, how surely the model copies each kind of name: the loss does not tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memsearcher_jax.agent import prompts as templates
from memsearcher_jax.agent.prompts import Prompts
from memsearcher_jax.agent.types import AgentConfig, Trajectory
from memsearcher_jax.config import RunConfig
from memsearcher_jax.data.demonstrator import Errors
from memsearcher_jax.data.world import World
from memsearcher_jax.report.metrics import Metrics, MetricsWriter
from memsearcher_jax.report.progress import Progress
from memsearcher_jax.rl import build, score
from memsearcher_jax.rl.demonstrate import FIRST_WORLD, SLOTS, Stage, demonstrate, open_stage, samples_of, slot_samples
from memsearcher_jax.rl.exercises import copies, decisions, recitations
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
    settings, row_tokens = config.demonstrations, config.training.row_tokens
    errors = Errors(settings.answer_early, settings.wrong_query, settings.bad_memory)
    parts = _parts(run)
    slots = _slots(run, parts)
    trainer, state = start.trainer, start.state
    numbers: Metrics = {}
    with Checkpoints(out / "checkpoints", keep=rl.keep_checkpoints) as checkpoints:
        for step in range(start.step, rl.steps):
            phases = Phases(progress.activity)
            with phases("demonstrate"):
                stage = _stage(config, FIRST_WORLD + config.seed * WORLDS_OF_A_SEED + step)
                played = [_demonstrations(run, part, stage, errors, step) for part in parts]
                demonstrated = [sample for trajectories in played for sample in samples_of(trajectories)]
                fitting = [sample for sample in demonstrated if len(sample.ids) <= row_tokens]
            with phases("update"):
                samples = fitting + _exercises(run, stage.world, errors, step)
                state, learned = trainer.learn(state, samples, numpy_rng(config.seed, "rows", step), progress.activity)
            numbers = score.summarise([score.scored(one) for one in played[0]]) | learned
            numbers["too_long"] = float(len(demonstrated) - len(fitting))
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


def _exercises(run: build.Run, world: World, errors: Errors, step: int) -> list[Sample]:
    settings, rng = run.config.demonstrations, numpy_rng(run.config.seed, "exercises", step)
    return [
        *copies(rng, run.tokenizer, settings.copies),
        *recitations(rng, run.tokenizer, world, settings.recitations),
        *decisions(rng, run.tokenizer, run.prompts, world, errors, settings.decisions),
    ]


@dataclass(frozen=True)
class Part:
    """One workflow that is demonstrated."""

    agent: AgentConfig
    prompts: Prompts
    problems: int  # of a step


def _parts(run: build.Run) -> list[Part]:
    """The run's own workflow, whose trajectories are scored, then ReAct if any problem is to be played so."""
    config, settings = run.config, run.config.demonstrations
    parts = [Part(config.agent, run.prompts, config.rl.problems)]
    if settings.histories:
        react = replace(config.agent, workflow="react", prompts=settings.history_prompts)
        parts.append(Part(react, templates.load(react), settings.histories))
    return parts


def _slots(run: build.Run, parts: Sequence[Part]) -> dict[str, list[Sample]]:
    """What is measured, by metric: faultless contexts, with the mask on the names that a reply copies."""
    found, stage = {}, _stage(run.config, HELD_OUT)
    for part in parts:
        faultless = _demonstrations(run, part, stage, Errors(0, 0, 0), 0)
        for slot in SLOTS:
            samples = slot_samples(faultless, slot, run.tokenizer)
            fitting = [sample for sample in samples if len(sample.ids) <= run.config.training.row_tokens]
            if fitting:  # who has no memory writes no fact into it
                found[slot if part is parts[0] else f"{part.agent.workflow}/{slot}"] = fitting
    return found


def _demonstrations(run: build.Run, part: Part, stage: Stage, errors: Errors, step: int) -> Sequence[Trajectory]:
    """Of so many questions of the stage's world, drawn without repetition, the parts' apart."""
    rng = numpy_rng(run.config.seed, f"demonstrate {part.agent.workflow}", step)
    problems = (*stage.world.train, *stage.world.test)
    chosen = rng.choice(len(problems), min(part.problems, len(problems)), replace=False)
    make_workflow = build.workflow_maker(part.agent, part.prompts, run.tokenizer)
    return demonstrate(stage, [problems[row] for row in chosen], errors, make_workflow, run.tokenizer, rng)
