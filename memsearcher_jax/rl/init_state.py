"""Where a run begins: at its initial weights, or at its newest checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from memsearcher_jax.agent.memalpha.prompts import MemalphaPrompts
from memsearcher_jax.agent.registry import WORKFLOWS
from memsearcher_jax.config import differences
from memsearcher_jax.model import lora, qwen, sharding
from memsearcher_jax.rl.carry_over import check_carried
from memsearcher_jax.rl.reward_fn import RewardFn, answer_rewards
from memsearcher_jax.rl.rng import named_key
from memsearcher_jax.rl.rollout import Params
from memsearcher_jax.rl.setup import Run, publish
from memsearcher_jax.rl.stream_reward import open_stream_reward_fn
from memsearcher_jax.runtime import hub, load_weights
from memsearcher_jax.runtime.health import HealthState, RunAborted
from memsearcher_jax.runtime.run_dir import checkpoints_of, is_run, read_run_config
from memsearcher_jax.training import checkpoint, update
from memsearcher_jax.training.checkpoint import Checkpoints, DamagedCheckpointError
from memsearcher_jax.training.trainer import Trainer, make_trainer
from memsearcher_jax.training.update import TrainState

REWARD_SETTINGS = ("evaluation.", "data.", "reward.", "memalpha.", "answerer.", "judge.")
"""Settings after whose change rewards are not comparable with earlier ones."""


@dataclass(frozen=True)
class RunState:
    """All that the loop needs to take its next step."""

    trainer: Trainer
    state: TrainState
    reward_fn: RewardFn
    step: int = 0  # steps taken
    position: int = 0  # problems taken from the loader
    initial_step: int | None = None  # of the run in model.path whose weights this run started from
    carried: str = ""  # trajectories under way, of `carry_over.to_text`; "" if there are none
    health: HealthState = field(default_factory=HealthState)

    def meta(self, position: int, carried: str, health: HealthState) -> dict[str, Any]:
        """What a checkpoint stores of the run besides the train state."""
        meta = {"position": position, "initial_step": self.initial_step, "health": asdict(health)}
        return meta | ({"carried": carried} if carried else {})


def initial_params(run: Run, step: int | None = None) -> Params:
    """The weights in model.path, or random ones from the seed, on the training mesh.

    In param_dtype, or in compute_dtype if LoRA freezes them. `step`: that of the checkpoint, if model.path is a run; by
    default the newest.
    """
    model, mesh = run.config.model, run.meshes.train
    if model.path:
        dtype = model.compute_dtype if model.lora_rank else model.param_dtype
        return load_weights.load_params(model.path, model, mesh, dtype, step)
    init = jax.jit(lambda key: qwen.init(key, model), out_shardings=sharding.param_shardings(model, mesh))
    return init(named_key(run.config.seed, "weights", 0))


def initial_adapters(run: Run) -> Params:
    """The adapters in model.adapter, or new ones from the seed, on the training mesh."""
    model, mesh = run.config.model, run.meshes.train
    if model.adapter:
        return load_weights.load_adapters(model, mesh)[1]
    shardings = jax.tree.map(lambda x: x.sharding, sharding.abstract_arrays(lora.adapter_specs(model), mesh))
    init = jax.jit(lambda key: lora.init(key, model), out_shardings=shardings)
    return init(named_key(run.config.seed, "adapters", 0))


def open_reward_fn(
    run: Run,
    initial_step: int | None = None,
    *,
    evaluation: bool = False,
    check: Callable[[], None] = lambda: None,
) -> RewardFn:
    """The reward function of the run's workflow, which `check` interrupts by raising. `initial_step`: see `RunState`.

    Where a stream's questions are answered by the initial policy, an evaluation of a trained run uses the weights that
    its training started from, as they were while it learned.
    """
    config = run.config
    if not WORKFLOWS[config.agent.workflow].reads_streams:
        return partial(answer_rewards, settings=config.reward, workflow=config.agent.workflow)
    if evaluation and config.model.path and is_run(config.model.path):
        trained, seed = load_weights.trained_model(config.model.path), read_run_config(config.model.path).seed
        model = replace(config.model, path=trained.path, adapter=trained.adapter, lora_rank=trained.lora_rank)
        initial_step = checkpoint.run_meta(checkpoints_of(config.model.path), trained).get("initial_step")
        run = replace(run, config=replace(config, seed=seed, model=model))

    def frozen() -> Params:
        with jax.set_mesh(run.meshes.train):
            return publish(run, initial_params(run, initial_step))

    prompts, mesh = run.prompts, run.meshes.local
    assert isinstance(prompts, MemalphaPrompts), "the registry loads the prompts of the workflow"
    return open_stream_reward_fn(config, prompts, run.tokenizer, mesh, frozen, evaluation=evaluation, check=check)


def initial_state(run: Run, check: Callable[[], None] = lambda: None) -> RunState:
    """Step 0. `check` interrupts the computation of rewards by raising."""
    model, mesh = run.config.model, run.meshes.train
    # The run in model.path may go on, but this one must find the same weights again when it resumes.
    step = load_weights.newest_step(model.path) if model.path else None
    with jax.set_mesh(mesh):
        params = initial_params(run, step)
        trainer = _open_trainer(run, params)
        if model.lora_rank:
            params = initial_adapters(run)
        state = update.init_state(params, model, update.make_optimizer(run.config.training), mesh)
        return RunState(trainer, state, open_reward_fn(run, step, check=check), initial_step=step)


def restored_state(run: Run, folder: Path, check: Callable[[], None] = lambda: None) -> RunState:
    """The newest intact checkpoint of the run in `folder`; frozen weights are the run's initial ones.

    `check` as for `initial_state`. Raises FileNotFoundError if frozen weights are needed and were a checkpoint that no
    longer exists, ValueError if carried trajectories cannot go on under changed settings.
    """
    model, mesh = run.config.model, run.meshes.train
    with jax.set_mesh(mesh):
        target = update.abstract_state(model, update.make_optimizer(run.config.training), mesh)
        try:
            step, state, meta = checkpoint.restore_latest(checkpoints_of(folder), model, target, _warn)
        except FileNotFoundError:  # the run was stopped before its first checkpoint
            return initial_state(run, check)
        changed = list(differences(hub.local(read_run_config(folder)), run.config))
        if carried := meta.get("carried", ""):
            check_carried(carried, run.config.rl, changed)
        source = meta.get("initial_step")
        health = HealthState(**meta.get("health", {}))
        if any(name.startswith(REWARD_SETTINGS) for name, *_ in changed):
            health = replace(health, rewards=[], best_mean=0.0, best_step=None, best_reward=None)
        needs_frozen = model.lora_rank or run.config.training.kl_coefficient
        trainer = _open_trainer(run, initial_params(run, source) if needs_frozen else {})
        trainer, reward_fn = _after_rollbacks(run, trainer, health), open_reward_fn(run, source, check=check)
        return RunState(trainer, state, reward_fn, step, meta["position"], source, carried, health)


def rolled_back(
    run: Run, trainer: Trainer, checkpoints: Checkpoints, health: HealthState
) -> tuple[Trainer, TrainState]:
    """The train state of the best checkpoint, and the trainer with the learning rate to go on with. Collective.

    Raises RunAborted if the checkpoint cannot be read.
    """
    model, mesh = run.config.model, run.meshes.train
    assert health.best_step is not None, "the monitor demands no rollback without one"
    with jax.set_mesh(mesh):
        target = update.abstract_state(model, update.make_optimizer(run.config.training), mesh)
        try:
            state = checkpoints.restore(health.best_step, model, target)
        except DamagedCheckpointError as error:
            raise RunAborted(f"no rollback is possible: {error}") from error
    return _after_rollbacks(run, trainer, health), state


def _after_rollbacks(run: Run, trainer: Trainer, health: HealthState) -> Trainer:
    factor = run.config.health.rollback_lr_factor**health.rollbacks
    return trainer.with_learning_rate(run.config.training.learning_rate * factor) if health.rollbacks else trainer


def _open_trainer(run: Run, reference_params: Params) -> Trainer:
    config, mesh = run.config, run.meshes.train
    temperature = config.sampling.temperature
    return make_trainer(
        config.model, config.training, mesh, reference_params, method=config.rl.method, temperature=temperature
    )


def _warn(message: str) -> None:
    if jax.process_index() == 0:
        print(message, file=sys.stderr, flush=True)
