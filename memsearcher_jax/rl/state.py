"""The policy that a run trains: its train state, its step, and the weights that the engines sample with."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from memsearcher_jax.config import RunConfig, agent_of, differences, from_dict
from memsearcher_jax.model import lora, qwen, sharding
from memsearcher_jax.rl.completers import open_completers, uses_initial_policy
from memsearcher_jax.rl.health import ROLLBACK_LR_FACTOR, WEIGHTS_NOT_FINITE, HealthState
from memsearcher_jax.rl.metrics import Metrics
from memsearcher_jax.rl.rewards import RewardFn, takes_context_rewards
from memsearcher_jax.rl.rng import named_key, named_rng
from memsearcher_jax.rl.rollout import Params
from memsearcher_jax.rl.setup import Run, publish
from memsearcher_jax.rl.text_logprobs import TextLogprobs
from memsearcher_jax.rl.timing import Timer
from memsearcher_jax.runs import load_weights
from memsearcher_jax.runs.run_dir import checkpoints_of, is_run, read_run_config
from memsearcher_jax.training import checkpoint, update
from memsearcher_jax.training.packing import TrainingExample
from memsearcher_jax.training.trainer import Trainer, make_trainer
from memsearcher_jax.training.update import TrainState

REWARD_SETTINGS = ("evaluation.", "data.", "reward.", "memalpha.", "answerer.", "judge.")
"""Settings after whose change rewards are not comparable with earlier ones."""


class TrainedBy(enum.Enum):
    """The command that trains a run. `meta_field`: of the meta of its checkpoints, which no other command writes."""

    RL = "launch/tpu_train.py", "position"
    SFT = "launch/sft.py", "trajectories"

    def __init__(self, command: str, meta_field: str):
        self.command = command
        self.meta_field = meta_field


@dataclass
class RunState:
    """The policy while it trains."""

    run: Run
    trainer: Trainer
    train: TrainState
    step: int = 0  # training steps taken
    params: Params = field(default_factory=dict)  # on the sampler's mesh; empty while the update has their memory

    def publish(self, timer: Timer | None = None) -> None:
        """The weights become those that the engines sample with. Every host must call it."""
        with (timer or Timer())("publish"):
            is_merged = self.trainer.base is not None
            self.params = publish(self.run, self.trainer.weights(self.train), owned=is_merged)

    def update(self, examples: list[TrainingExample], timer: Timer) -> Metrics:
        """Trains on the examples, once. Every host must call it, with the same examples."""
        self.params = {}
        rng = named_rng(self.run.config.seed, "rows", self.step)
        with timer("update"):
            self.train, metrics = self.trainer.step(self.train, examples, rng, timer.notify, self.step)
            if not self.weights_are_finite():
                metrics[WEIGHTS_NOT_FINITE] = 1.0
        return metrics

    def weights_are_finite(self) -> bool:
        """Whether no update has made what is trained infinite or NaN. Every host must call it."""
        return weights_are_finite(self.train)

    def restore(self, train: TrainState, rollbacks: int) -> None:
        """Goes on from another train state, with the learning rate after so many rollbacks."""
        self.train = train
        if rollbacks:
            rate = self.run.config.training.learning_rate * ROLLBACK_LR_FACTOR**rollbacks
            self.trainer = self.trainer.with_learning_rate(rate)


def weights_are_finite(train: TrainState) -> bool:
    """Whether all that is trained is finite. Collective: one pass over the weights, where they are."""
    return bool(_all_finite(train.params))


@jax.jit
def _all_finite(params: Params) -> jax.Array:
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(params)]).all()


@dataclass(frozen=True)
class SavedProgress:
    """What a checkpoint holds besides the train state."""

    settings: RunConfig  # as they were given
    inputs: Mapping[str, str] = field(default_factory=dict)  # hashes of what the run was given
    position: int = 0  # problems taken from the loader
    initial_step: int | None = None  # of the run in model.path whose weights this run started from
    carried: str = ""  # trajectories under way, of `carry_over.to_text`; "" if there are none
    health: HealthState = field(default_factory=HealthState)
    changed: tuple[tuple[str, Any, Any], ...] = ()  # (name, old value, new value) of settings, since the checkpoint


def initial_params(run: Run, step: int | None = None) -> Params:
    """The weights in model.path, or random ones from the seed, on the training mesh.

    In param_dtype, or in compute_dtype if LoRA freezes them. `step`: that of the checkpoint, if model.path is a run; by
    default the newest.
    """
    model = run.config.model
    mesh = run.meshes.train
    if model.path:
        dtype = model.compute_dtype if model.lora_rank else model.param_dtype
        return load_weights.load_params(model.path, model, mesh, dtype, step)
    init = jax.jit(qwen.init, static_argnums=1, out_shardings=sharding.param_shardings(model, mesh))
    return init(named_key(run.config.seed, "weights", 0), model)


def initial_adapters(run: Run) -> Params:
    """The adapters in model.adapter, or new ones from the seed, on the training mesh."""
    model = run.config.model
    mesh = run.meshes.train
    if model.adapter:
        return load_weights.load_adapters(model, mesh)[1]
    shardings = jax.tree.map(lambda x: x.sharding, sharding.abstract_arrays(lora.adapter_specs(model), mesh))
    init = jax.jit(lora.init, static_argnums=1, out_shardings=shardings)
    return init(named_key(run.config.seed, "adapters", 0), model)


def initial_policy(run: Run, step: int | None = None) -> Params:
    """The policy before training on the sampler's mesh, with the adapters that it started from."""
    model = run.config.model
    if model.lora_rank:  # without a rank, `initial_params` merges the adapters; new ones change nothing
        run = replace(run, config=replace(run.config, model=replace(model, lora_rank=0)))
    with jax.set_mesh(run.meshes.train):
        return publish(run, initial_params(run, step))


def open_reward_fn(
    run: Run, initial_step: int | None = None, *, evaluation: bool = False, check: Callable[[], None] = lambda: None
) -> RewardFn:
    """The reward function of the run's agent, which `check` interrupts by raising. `initial_step`: see `SavedProgress`.

    Where the initial policy answers, an evaluation of a trained run uses the weights that its training started from.
    """
    config = run.config
    reward_fn = RewardFn(
        run.agent,
        run.tokenizer,
        evaluation=evaluation,
        takes_context_rewards=takes_context_rewards(config.rl),
        text_logprobs=TextLogprobs(
            model=config.model,
            weights_dtype=config.sampling.weights_dtype(config.model.compute_dtype),
            mesh=run.meshes.local,
            tokenizer=run.tokenizer,
            context_tokens=config.sampling.context_tokens,
            logit_chunk=config.training.logit_chunk,
        ),
    )
    if not run.agent.needs_completers:
        return reward_fn
    if evaluation and config.model.path and is_run(config.model.path):
        trained = load_weights.trained_model(config.model.path)
        seed = read_run_config(config.model.path).seed
        model = replace(config.model, path=trained.path, adapter=trained.adapter, lora_rank=trained.lora_rank)
        initial_step = checkpoint.run_meta(checkpoints_of(config.model.path), trained).get("initial_step")
        run = replace(run, config=replace(config, seed=seed, model=model))
    answerer, judge = open_completers(
        config, run.agent, run.tokenizer, run.meshes.local, lambda: initial_policy(run, initial_step), check
    )
    return replace(reward_fn, answerer=answerer, judge=judge)


def open_state(
    run: Run, settings: RunConfig | None = None, folder: Path | None = None
) -> tuple[RunState, SavedProgress]:
    """Step 0, or the newest intact checkpoint of the run in `folder`: see `open_policy`.

    `settings`: as they were given, if the run reads its own copies of files. What has changed is found by comparing
    them with those of the checkpoint.
    """
    settings = settings or run.config
    needs_weights = needs_initial_weights(run.config)
    state, meta = open_policy(run, folder, TrainedBy.RL, partial(_make_trainer, run), needs_weights)
    is_new = TrainedBy.RL.meta_field not in meta
    if is_new:
        return state, SavedProgress(settings, initial_step=meta["initial_step"])
    changed = tuple(differences(from_dict(meta["settings"]), settings))
    health = HealthState(**meta["health"])
    if any(name.startswith(REWARD_SETTINGS) for name, _, _ in changed):
        health = health.without_rewards()
    state.restore(state.train, health.rollbacks)
    progress = SavedProgress(
        settings,
        inputs=meta["inputs"],
        position=meta["position"],
        initial_step=meta["initial_step"],
        carried=meta.get("carried", ""),
        health=health,
        changed=changed,
    )
    return state, progress


def open_policy(
    run: Run,
    folder: Path | None,
    trained_by: TrainedBy,
    make_trainer: Callable[[Params], Trainer],
    needs_weights: bool,
) -> tuple[RunState, dict[str, Any]]:
    """The policy at step 0, or at the newest intact checkpoint of the run in `folder`, and the meta of that.

    `make_trainer` gets the initial weights; where the run goes on, only if `needs_weights`. Raises ValueError if
    another command has trained the run, FileNotFoundError if it needs weights that were a checkpoint which no longer
    exists.
    """
    model = run.config.model
    mesh = run.meshes.train
    optimizer = update.make_optimizer(run.config.training)
    with jax.set_mesh(mesh):
        target = update.abstract_state(model, optimizer, mesh)
        newest = _newest_checkpoint(run, folder, target)
        if newest is None:
            # The run in model.path may go on, but this one must find the same weights again when it resumes.
            initial_step = load_weights.newest_step(model.path) if model.path else None
            params = initial_params(run, initial_step)
            trainer = make_trainer(params)
            trained = initial_adapters(run) if model.lora_rank else params
            train = update.init_state(trained, model, optimizer, mesh)
            return RunState(run, trainer, train), {"initial_step": initial_step}

        assert folder is not None, "only a folder has checkpoints"
        require_trained(folder, trained_by, newest.meta)
        params = initial_params(run, newest.meta["initial_step"]) if needs_weights else {}
        return RunState(run, make_trainer(params), newest.train, newest.step), newest.meta


class _Checkpoint(NamedTuple):
    step: int
    train: TrainState
    meta: dict[str, Any]


def _newest_checkpoint(run: Run, folder: Path | None, target: TrainState) -> _Checkpoint | None:
    """The newest intact one of the run in `folder`; None if it is new, or was stopped before its first checkpoint."""
    if folder is None:
        return None
    try:
        return _Checkpoint(*checkpoint.restore_latest(checkpoints_of(folder), run.config.model, target, _warn))
    except FileNotFoundError:
        return None


def require_trained(folder: Path, trained_by: TrainedBy, meta: Mapping[str, Any]) -> None:
    """Raises ValueError where the meta of a checkpoint shows that another command has trained the run in `folder`."""
    if trained_by.meta_field in meta:
        return
    others = [other.command for other in TrainedBy if other.meta_field in meta]
    other = others[0] if others else "another command"
    raise ValueError(f"{folder} was trained by {other}: resume it with that, or give it to --checkpoint")


def needs_initial_weights(config: RunConfig) -> bool:
    """Whether a run that goes on from a checkpoint needs the weights in model.path."""
    completes = agent_of(config).needs_completers and uses_initial_policy(config)
    is_reference = config.training.kl_coefficient and not config.teacher.path
    return bool(config.model.lora_rank or is_reference or completes)


def _make_trainer(run: Run, initial_params: Params) -> Trainer:
    config = run.config
    mesh = run.meshes.train
    teacher = None
    if config.teacher.path:
        model = load_weights.teacher_model(config)
        params = load_weights.load_params(config.teacher.path, model, mesh, model.compute_dtype)
        teacher = model, params
    return make_trainer(
        config.model,
        config.training,
        mesh,
        initial_params,
        method="grpo",
        temperature=config.sampling.temperature,
        steps=config.rl.steps,
        teacher=config.teacher,
        teacher_model=teacher,
    )


def _warn(message: str) -> None:
    if jax.process_index() == 0:
        print(message, file=sys.stderr, flush=True)
