"""Checkpoints by orbax: a folder per step, in three items that are read apart.

    DIRECTORY/STEP/params      the weights; export and evaluation read only these
    DIRECTORY/STEP/optimizer   the optimiser's state and its step
    DIRECTORY/STEP/meta        JSON: the model's config and whatever the loop needs to go on

A step is written beside its place and renamed when it is whole, so a killed run leaves the older steps as they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.training.update import TrainState

ITEMS = ("params", "optimizer", "meta")
# Weights saved by one run load into a model that differs in these; any other difference is another model.
FREE_FIELDS = {"max_positions", "param_dtype", "compute_dtype", "attention", "remat", "path", "tokenizer"}


class Checkpoints:
    """Writes the checkpoints of one run, in the background. A context manager: leaving it waits for the last write."""

    def __init__(self, directory: str | Path, *, keep: int) -> None:
        """`keep`: the newest steps that stay on disk. Half-written steps of a killed run are moved out of the way."""
        self._manager = ocp.CheckpointManager(
            _absolute(directory),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True),
            item_names=ITEMS,
        )
        _set_aside_incomplete(self._manager)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(self, step: int, state: TrainState, model_config: ModelConfig, meta: Mapping[str, Any]) -> None:
        """Copies the state off the device and returns; `state` may be donated at once. `meta` must be plain JSON.

        Raises ValueError if the directory already holds this step or a later one.
        """
        args = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            optimizer=ocp.args.StandardSave({"step": state.step, "opt_state": state.opt_state}),
            meta=ocp.args.JsonSave({"model": dataclasses.asdict(model_config), "run": dict(meta)}),
        )
        if self.newest is not None and step <= self.newest:
            raise ValueError(
                f"step {step} is not saved: {self._manager.directory} already holds step {self.newest}; "
                "resume from it or choose another folder"
            )
        self._manager.save(step, args=args, force=True)

    @property
    def newest(self) -> int | None:
        """The newest step that is whole or being written."""
        return self._manager.latest_step()

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.close()


def latest_step(directory: str | Path) -> int | None:
    """The newest whole step, or None. Half-written ones do not count."""
    with _reader(directory) as manager:
        return max(_complete_steps(manager), default=None)


def restore_latest(directory: str | Path, model_config: ModelConfig, target: TrainState) -> tuple[TrainState, dict]:
    """The newest state, and the meta saved with it.

    `target`: shapes, types and shardings (`update.abstract_state`); any mesh will do, values stay bit-exact.
    Raises FileNotFoundError without a checkpoint, ValueError for another model or a file that cannot be read.
    """
    with _reader(directory) as manager:
        step = _newest(manager)
        meta = _read_meta(manager, step)
        _check_same_model(manager, step, meta["model"], model_config)
        optimizer = {"step": target.step, "opt_state": target.opt_state}
        restored = _restore(
            manager,
            step,
            params=ocp.args.StandardRestore(target.params),
            optimizer=ocp.args.StandardRestore(optimizer),
        )
    return TrainState(params=restored.params, **restored.optimizer), meta["run"]


def restore_params(directory: str | Path, model_config: ModelConfig, target: dict) -> dict:
    """The newest weights, and nothing else, with the shapes, types and shardings of `target`.

    Raises FileNotFoundError without a checkpoint, ValueError for another model or a file that cannot be read.
    """
    with _reader(directory) as manager:
        step = _newest(manager)
        _check_same_model(manager, step, _read_meta(manager, step)["model"], model_config)
        return _restore(manager, step, params=ocp.args.StandardRestore(target)).params


def _absolute(directory: str | Path) -> str:
    """Orbax wants absolute paths; bucket addresses are already."""
    return str(directory) if "://" in str(directory) else str(Path(directory).expanduser().absolute())


def _reader(directory: str | Path) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(read_only=True)
    return ocp.CheckpointManager(_absolute(directory), options=options, item_names=ITEMS)


def _complete_steps(manager: ocp.CheckpointManager) -> list[int]:
    """Orbax itself lists every folder with a number for a name, also one that a failed copy left behind."""

    def is_complete(step: int) -> bool:
        folder = manager.directory / str(step)
        return (folder / "_CHECKPOINT_METADATA").exists() and all((folder / item).exists() for item in ITEMS)

    return [step for step in manager.all_steps() if is_complete(step)]


def _set_aside_incomplete(manager: ocp.CheckpointManager) -> None:
    """Orbax would take a half-written step for the newest and save nothing before it."""
    incomplete = set(manager.all_steps()) - set(_complete_steps(manager))
    for step in incomplete if jax.process_index() == 0 else ():
        aside = manager.directory / f"{step}.incomplete"
        if aside.exists():
            aside.rmtree()
        (manager.directory / str(step)).rename(aside)
    if incomplete:
        manager.reload()


def _newest(manager: ocp.CheckpointManager) -> int:
    steps = _complete_steps(manager)
    if not steps:
        raise FileNotFoundError(f"no checkpoint in {manager.directory}")
    return max(steps)


def _read_meta(manager: ocp.CheckpointManager, step: int) -> dict:
    meta = _restore(manager, step, meta=ocp.args.JsonRestore()).meta
    if not isinstance(meta, dict) or not {"model", "run"} <= meta.keys():
        raise ValueError(f"{manager.directory / str(step)} is no checkpoint of this program")
    return meta


def _check_same_model(manager: ocp.CheckpointManager, step: int, saved: dict, model_config: ModelConfig) -> None:
    # A checkpoint from before a field was there is of its default.
    saved = dataclasses.asdict(ModelConfig()) | saved
    differences = [
        f"{field.name} is {saved[field.name]} there and {getattr(model_config, field.name)} here"
        for field in dataclasses.fields(ModelConfig)
        if field.name not in FREE_FIELDS and saved[field.name] != getattr(model_config, field.name)
    ]
    if differences:
        raise ValueError(f"{manager.directory / str(step)} holds another model: {'; '.join(differences)}")


def _restore(manager: ocp.CheckpointManager, step: int, **items: ocp.args.CheckpointArgs) -> ocp.args.Composite:
    try:
        return manager.restore(step, args=ocp.args.Composite(**items))
    except Exception as error:  # a damaged file ends in any of a dozen types, from json's to tensorstore's
        older = [other for other in _complete_steps(manager) if other < step]
        way_out = f"move it away to go on from step {max(older)}" if older else "there is no older one"
        reason = (str(error).splitlines() or [""])[0][:200]
        raise ValueError(
            f"checkpoint {manager.directory / str(step)} cannot be read ({type(error).__name__}: {reason}): {way_out}"
        ) from error
