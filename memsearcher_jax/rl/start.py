"""Where a run begins: at its starting weights, or at its newest checkpoint."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.rl import reading, source
from memsearcher_jax.rl.build import Run, sampler_params
from memsearcher_jax.rl.exam import Exam
from memsearcher_jax.rl.keys import key_for
from memsearcher_jax.rl.run_folder import checkpoints_of, is_run, read_run_config
from memsearcher_jax.rl.trainer import Trainer, make_trainer
from memsearcher_jax.training import checkpoint, update
from memsearcher_jax.training.update import TrainState


@dataclass(frozen=True)
class Start:
    """All that the loop needs to take its next step."""

    trainer: Trainer
    state: TrainState
    step: int = 0  # steps taken
    position: int = 0  # problems taken from the stream
    exam: Exam | None = None  # where workflows read streams


def starting_params(run: Run) -> dict:
    """The weights in model.path, or random ones from the seed, on the training mesh in param_dtype."""
    model, mesh = run.config.model, run.meshes.train
    if model.path:
        return source.load_params(model.path, model, mesh, model.param_dtype)
    init = jax.jit(lambda key: qwen.init(key, model), out_shardings=sharding.param_shardings(model, mesh))
    return init(key_for(run.config.seed, "weights", 0))


def open_exam(run: Run, *, evaluation: bool = False) -> Exam | None:
    """Whoever answers and judges, for workflows that read streams: by default the run's starting weights, frozen.

    In `evaluation` of a training run they are those that its training started from, as they were while it learned.
    """
    config = run.config
    if config.agent.workflow != "memalpha":
        return None
    if evaluation and config.model.path and is_run(config.model.path):
        trained = read_run_config(config.model.path)
        model = replace(config.model, path=trained.model.path)
        run = replace(run, config=replace(config, seed=trained.seed, model=model))

    def frozen() -> dict:
        with jax.set_mesh(run.meshes.train):
            return sampler_params(run, starting_params(run))

    return reading.open_exam(config, run.prompts, run.tokenizer, run.meshes.local, frozen, evaluation=evaluation)


def fresh(run: Run) -> Start:
    """Step 0."""
    model, mesh = run.config.model, run.meshes.train
    with jax.set_mesh(mesh):
        params = starting_params(run)
        trainer = make_trainer(run.config, mesh, params)
        optimizer = update.make_optimizer(run.config.training)
        return Start(trainer, update.init_state(params, model, optimizer, mesh), exam=open_exam(run))


def resumed(run: Run, folder: Path) -> Start:
    """The newest sound checkpoint of the run in `folder`; the frozen weights are the run's starting ones."""
    model, mesh = run.config.model, run.meshes.train
    checkpoints = checkpoints_of(folder)
    if checkpoint.latest_step(checkpoints) is None:
        return fresh(run)
    with jax.set_mesh(mesh):
        target = update.abstract_state(model, update.make_optimizer(run.config.training), mesh)
        step, state, meta = checkpoint.restore_latest(checkpoints, model, target, _tell)
        trainer = make_trainer(run.config, mesh, starting_params(run))
        return Start(trainer, state, step, meta["position"], open_exam(run))


def _tell(line: str) -> None:
    """What must not be missed, once."""
    if jax.process_index() == 0:
        print(line, file=sys.stderr, flush=True)
