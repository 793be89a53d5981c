"""What a warm start learns of searching: the scripted agent's trajectories in worlds that nobody has seen, errors
included, with a memory and, if that is wished, others of them with the whole history, so that one start serves both
workflows; and exercises in what the demonstrations alone teach late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from memsearcher_jax.agent import prompts as templates
from memsearcher_jax.agent.prompts import Prompts
from memsearcher_jax.agent.types import AgentConfig, Trajectory
from memsearcher_jax.config import RunConfig
from memsearcher_jax.data.demonstrator import Errors
from memsearcher_jax.data.world import World
from memsearcher_jax.report.metrics import Metrics
from memsearcher_jax.rl import build, score
from memsearcher_jax.rl.demonstrate import FIRST_WORLD, SLOTS, Stage, demonstrate, open_stage, samples_of, slot_samples
from memsearcher_jax.rl.exercises import copies, decisions, recitations
from memsearcher_jax.rl.keys import numpy_rng
from memsearcher_jax.training.rows import Sample

HELD_OUT = 999  # seed of the world in which copying is measured
WORLDS_OF_A_SEED = 1_000_000


@dataclass(frozen=True)
class Part:
    """One workflow that is demonstrated."""

    agent: AgentConfig
    prompts: Prompts
    problems: int  # of a step


@dataclass(frozen=True)
class WorldLessons:
    """The lessons of a run whose workflow searches."""

    run: build.Run

    def of_step(self, step: int) -> tuple[list[Sample], Metrics]:
        """The samples of a step, the same whenever it is asked for, and what the script scored."""
        config, errors = self.run.config, self._errors
        stage = _stage(config, FIRST_WORLD + config.seed * WORLDS_OF_A_SEED + step)
        played = [self._demonstrations(part, stage, errors, step) for part in self._parts]
        samples = [sample for trajectories in played for sample in samples_of(trajectories)]
        exercises = self._exercises(stage.world, errors, step)
        return samples + exercises, score.summarise([score.scored(one) for one in played[0]])

    def measured(self) -> dict[str, list[Sample]]:
        """By slot: faultless contexts, with the mask on the names that a reply copies."""
        found, stage = {}, _stage(self.run.config, HELD_OUT)
        for part in self._parts:
            faultless = self._demonstrations(part, stage, Errors(0, 0, 0), 0)
            for slot in SLOTS:
                samples = slot_samples(faultless, slot, self.run.tokenizer)
                if samples:  # who has no memory writes no fact into it
                    found[slot if part is self._parts[0] else f"{part.agent.workflow}/{slot}"] = samples
        return found

    @property
    def _errors(self) -> Errors:
        settings = self.run.config.demonstrations
        return Errors(settings.answer_early, settings.wrong_query, settings.bad_memory)

    @cached_property
    def _parts(self) -> list[Part]:
        """The run's own workflow, whose trajectories are scored, then ReAct if any problem is to be played so."""
        config, settings = self.run.config, self.run.config.demonstrations
        parts = [Part(config.agent, self.run.prompts, config.rl.problems)]
        if settings.histories:
            react = replace(config.agent, workflow="react", prompts=settings.history_prompts)
            parts.append(Part(react, templates.load(react), settings.histories))
        return parts

    def _demonstrations(self, part: Part, stage: Stage, errors: Errors, step: int) -> Sequence[Trajectory]:
        """Of so many questions of the stage's world, drawn without repetition, the parts' apart."""
        rng = numpy_rng(self.run.config.seed, f"demonstrate {part.agent.workflow}", step)
        problems = (*stage.world.train, *stage.world.test)
        chosen = rng.choice(len(problems), min(part.problems, len(problems)), replace=False)
        make_workflow = build.workflow_maker(part.agent, part.prompts, self.run.tokenizer)
        return demonstrate(stage, [problems[row] for row in chosen], errors, make_workflow, self.run.tokenizer, rng)

    def _exercises(self, world: World, errors: Errors, step: int) -> list[Sample]:
        settings, tokenizer = self.run.config.demonstrations, self.run.tokenizer
        rng = numpy_rng(self.run.config.seed, "exercises", step)
        return [
            *copies(rng, tokenizer, settings.copies),
            *recitations(rng, tokenizer, world, settings.recitations),
            *decisions(rng, tokenizer, self.run.prompts, world, errors, settings.decisions),
        ]


def _stage(config: RunConfig, seed: int) -> Stage:
    return open_stage(replace(config.data.world, seed=seed), config.retrieval)
