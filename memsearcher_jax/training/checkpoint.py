"""Checkpoints by orbax: a folder per step, in three items that are read apart.

    DIRECTORY/STEP/params      the weights; export and evaluation read only these
    DIRECTORY/STEP/optimizer   the optimiser's state and its step
    DIRECTORY/STEP/meta        JSON: the model's config, whatever the loop needs to go on, and digests of all of it

A step is written beside its place and renamed when it is whole, so a killed run leaves the older steps as they were.
What comes back is compared with the digests (`digest.py`): a file may be whole and still not hold what was written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.training.digest import digests
from memsearcher_jax.training.saved import SavedParams
from memsearcher_jax.training.update import TrainState

ITEMS = ("params", "optimizer", "meta")
# Weights saved by one run load into a model that differs in these; any other difference is another model.
FREE_FIELDS = {"max_positions", "param_dtype", "compute_dtype", "attention", "remat", "path", "tokenizer"}
CHUNK_BYTES = 64 << 20  # at most, of a piece of a file: pieces are read one at a time


class Damaged(ValueError):
    """A checkpoint that cannot be read, or does not hold what was saved."""


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

        Raises ValueError if the directory already holds this step or a later one, OSError in one line if this step, or
        the one before it, cannot be written: no step is half there then.
        """
        if self.newest is not None and step <= self.newest:
            raise ValueError(
                f"step {step} is not saved: {self._manager.directory} already holds step {self.newest}; "
                "resume from it or choose another folder"
            )
        optimizer = {"step": state.step, "opt_state": state.opt_state}
        told = {
            "model": dataclasses.asdict(model_config),
            "run": dict(meta),
            "digests": {"params": digests(state.params), "optimizer": digests(optimizer)},
        }
        args = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params, save_args=_cuts(state.params)),
            optimizer=ocp.args.StandardSave(optimizer),
            meta=ocp.args.JsonSave(told | {"digest": _digest(told)}),
        )
        with _written(self._manager):  # the step before it is on disk only now
            self._manager.save(step, args=args, force=True)

    @property
    def newest(self) -> int | None:
        """The newest step that is whole or being written."""
        return self._manager.latest_step()

    def close(self) -> None:
        """Waits until everything is on disk. Raises OSError in one line if that cannot be."""
        with _written(self._manager):
            self._manager.close()


def _cuts(params: dict) -> dict:
    """How the files of the weights are cut: by layer what is stacked by layer, by size the rest.

    `shard_axes` cuts an axis to single entries, however small they are: a table of tokens must not have it.
    """

    def cut(path: tuple, _: jax.Array) -> ocp.SaveArgs:
        return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if path[0].key == "layers" else ())

    return jax.tree.map_with_path(cut, params)


@contextlib.contextmanager
def _written(manager: ocp.CheckpointManager) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of a full disk alone there are half a dozen types
        reason = " ".join(str(error).split())[:200]
        raise OSError(
            f"a checkpoint in {manager.directory} is not written ({type(error).__name__}: {reason}); "
            "the steps before it are whole"
        ) from error


def latest_step(directory: str | Path) -> int | None:
    """The newest whole step, or None. Half-written ones do not count."""
    with _reader(directory) as manager:
        return max(_complete_steps(manager), default=None)


def restore_latest(
    directory: str | Path, model_config: ModelConfig, target: TrainState, tell: Callable[[str], None]
) -> tuple[int, TrainState, dict]:
    """The newest step that is whole and sound, its state, and the meta saved with it. All hosts must call it.

    `target`: shapes, types and shardings (`update.abstract_state`); any mesh and any number of hosts will do, values
    stay bit-exact. A damaged step is renamed to STEP.damaged, `tell` hears why in one line, and the one before it is
    read. Raises FileNotFoundError without a checkpoint, ValueError for another model or if none is sound.
    """
    with _reader(directory) as manager:
        steps = sorted(_complete_steps(manager), reverse=True)
        if not steps:
            raise FileNotFoundError(f"no checkpoint in {manager.directory}")
        for step in steps:
            restored, trouble = None, ""
            try:
                restored = _restore_state(manager, step, model_config, target)
            except Damaged as error:
                trouble = str(error)
            trouble = _agreed(trouble) or _difference(manager, step, restored)
            if not trouble:
                return step, restored[0], restored[1]["run"]
            tell(f"{trouble}: it is kept as {step}.damaged")
            _set_aside(manager, step, "damaged")
    raise ValueError(f"no checkpoint in {directory} can be read: all are kept there as STEP.damaged")


def restore_params(directory: str | Path, model_config: ModelConfig, target: dict) -> dict:
    """The newest weights, and nothing else, with the shapes, types and shardings of `target`.

    Raises FileNotFoundError without a checkpoint, ValueError for another model or one that is damaged.
    """
    with _reader(directory) as manager:
        step = _newest(manager)
        meta = _read_meta(manager, step)
        _check_same_model(manager, step, meta["model"], model_config)
        dtype = meta["model"]["param_dtype"]
        saved = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), target)
        try:
            params = _restore(manager, step, params=ocp.args.StandardRestore(saved)).params
            _compare(manager, step, "params", params, meta)
        except Damaged as error:
            older = [other for other in _complete_steps(manager) if other < step]
            way_out = f"move it away to go on from step {max(older)}" if older else "there is no older one"
            raise Damaged(f"{error}: {way_out}") from error
        if all(x.dtype == dtype for x in jax.tree.leaves(target)):
            return params
        cast = jax.jit(lambda x, like: x.astype(like), static_argnums=1)
        return jax.tree.map(lambda x, like: cast(x, like.dtype.name), params, target)


def open_params(directory: str | Path, model_config: ModelConfig) -> SavedParams:
    """The newest weights, to be read piece by piece. Raises as `restore_params` does, for damage when it is read."""
    with _reader(directory) as manager:
        step = _newest(manager)
        meta = _read_meta(manager, step)
        _check_same_model(manager, step, meta["model"], model_config)
        return SavedParams(manager.directory / str(step) / "params", model_config, meta["digests"]["params"])


def _absolute(directory: str | Path) -> str:
    """Orbax wants absolute paths; bucket addresses are already."""
    return str(directory) if "://" in str(directory) else str(Path(directory).expanduser().absolute())


def _reader(directory: str | Path) -> ocp.CheckpointManager:
    """Each host reads for itself: a file that one of them cannot read must not keep the others waiting for it."""
    host, alone = jax.process_index(), ocp.options.MultiprocessingOptions()
    if jax.process_count() > 1:
        alone = ocp.options.MultiprocessingOptions(host, {host}, barrier_sync_key_prefix=f"host{host}")
    options = ocp.CheckpointManagerOptions(read_only=True, multiprocessing_options=alone)
    return ocp.CheckpointManager(_absolute(directory), options=options, item_names=ITEMS)


def _complete_steps(manager: ocp.CheckpointManager) -> list[int]:
    """Orbax itself lists every folder with a number for a name, also one that a failed copy left behind."""

    def is_complete(step: int) -> bool:
        folder = manager.directory / str(step)
        return (folder / "_CHECKPOINT_METADATA").exists() and all((folder / item).exists() for item in ITEMS)

    return [step for step in manager.all_steps() if is_complete(step)]


def _set_aside_incomplete(manager: ocp.CheckpointManager) -> None:
    """Orbax would take a half-written step for the newest and save nothing before it."""
    incomplete = sorted(set(manager.all_steps()) - set(_complete_steps(manager)))
    _meet("incomplete steps are counted")
    for step in incomplete:
        _set_aside(manager, step, "incomplete")
    if incomplete:
        manager.reload()


def _set_aside(manager: ocp.CheckpointManager, step: int, why: str) -> None:
    """Renames a step so that nothing takes it for one. The first host does, and all wait for it."""
    if jax.process_index() == 0:
        aside = manager.directory / f"{step}.{why}"
        if aside.exists():
            aside.rmtree()
        (manager.directory / str(step)).rename(aside)
    _meet(f"step {step} is set aside")


def _meet(where: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)


def _agreed(trouble: str) -> str:
    """The trouble of any host, on all of them."""
    if jax.process_count() == 1:
        return trouble
    troubled = multihost_utils.process_allgather(np.int32(bool(trouble))).reshape(-1)
    return trouble or (f"host {int(troubled.argmax())} cannot read a checkpoint" if troubled.any() else "")


def _restore_state(
    manager: ocp.CheckpointManager, step: int, model_config: ModelConfig, target: TrainState
) -> tuple[TrainState, dict]:
    meta = _read_meta(manager, step)
    _check_same_model(manager, step, meta["model"], model_config)
    optimizer = {"step": target.step, "opt_state": target.opt_state}
    items = {"params": ocp.args.StandardRestore(target.params), "optimizer": ocp.args.StandardRestore(optimizer)}
    restored = _restore(manager, step, **items)
    return TrainState(params=restored.params, **restored.optimizer), meta


def _difference(manager: ocp.CheckpointManager, step: int, restored: tuple[TrainState, dict]) -> str:
    """Why this is not the state that was saved; empty if it is. All hosts must call it."""
    state, meta = restored
    try:
        _compare(manager, step, "params", state.params, meta)
        _compare(manager, step, "optimizer", {"step": state.step, "opt_state": state.opt_state}, meta)
    except Damaged as error:
        return str(error)
    return ""


def _compare(manager: ocp.CheckpointManager, step: int, item: str, tree: Any, meta: dict) -> None:
    """Raises Damaged unless these arrays are those that were saved."""
    wrong = [path for path, one in digests(tree).items() if meta["digests"][item].get(path) != one]
    if wrong:
        raise Damaged(f"checkpoint {manager.directory / str(step)} is damaged: {item} {wrong[0]} is not what was saved")


def _digest(told: dict) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _newest(manager: ocp.CheckpointManager) -> int:
    steps = _complete_steps(manager)
    if not steps:
        raise FileNotFoundError(f"no checkpoint in {manager.directory}")
    return max(steps)


def _read_meta(manager: ocp.CheckpointManager, step: int) -> dict:
    meta = _restore(manager, step, meta=ocp.args.JsonRestore()).meta
    where = manager.directory / str(step)
    if not isinstance(meta, dict) or not {"model", "run", "digests", "digest"} <= meta.keys():
        raise Damaged(f"checkpoint {where} is no checkpoint of this program")
    if meta.pop("digest") != _digest(meta):
        raise Damaged(f"checkpoint {where} is damaged: meta is not what was saved")
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
        reason = (str(error).splitlines() or [""])[0][:200]
        raise Damaged(
            f"checkpoint {manager.directory / str(step)} cannot be read ({type(error).__name__}: {reason})"
        ) from error
