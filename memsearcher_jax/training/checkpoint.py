"""The checkpoints of a run: writing them in the background, and choosing one to restore.

`checkpoint_files.py` describes what one holds, and reads it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.qwen import Params
from memsearcher_jax.training.checkpoint_files import (
    ITEMS,
    DamagedCheckpointError,
    absolute,
    array_items,
    complete_steps,
    error_line,
    json_checksum,
    open_reader,
    read_meta,
    restore_items,
    select_step,
)
from memsearcher_jax.training.checksums import checksums
from memsearcher_jax.training.update import TrainState

NO_STEP = -1  # in the place of a step, between hosts
MAX_CHUNK_BYTES = 64 << 20  # of a file; chunks are read one at a time


@dataclasses.dataclass(frozen=True)
class _NewestAndBest:
    """An orbax PreservationPolicy."""

    keep: int
    best: Callable[[], int | None]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: object) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        return [step in (*steps[-self.keep :], self.best()) for step in steps]


class Checkpoints(contextlib.AbstractContextManager):
    """Writes the checkpoints of a run in the background. A context manager: leaving it waits for the last write."""

    def __init__(self, directory: str | Path, *, keep: int, best: Callable[[], int | None] = lambda: None) -> None:
        """`keep`: number of newest steps to keep; `best`: another step to keep, asked whenever one is saved."""
        self._manager = ocp.CheckpointManager(
            absolute(directory),
            # Hosts cache the listings of a bucket, each at another time.
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_NewestAndBest(keep, best),
                cleanup_tmp_directories=True,
                single_host_load_and_broadcast=True,
            ),
            item_names=ITEMS,
        )
        self._a_write_failed = False

    def __exit__(self, *_: object) -> None:
        """Waits until everything is written. Raises OSError in one line if that fails."""
        with self._write_errors():
            self._manager.close()

    def save(self, step: int, state: TrainState, model_config: ModelConfig, meta: Mapping[str, Any]) -> None:
        """Copies the state to the host and returns; `state` may be donated at once. `meta` must be plain JSON.

        Raises OSError in one line if this step or the one before it cannot be written, or if it is there already. A
        failed write leaves no partial step.
        """
        items = array_items(state)
        content = {
            "model": dataclasses.asdict(model_config),
            "run": dict(meta),
            "array_checksums": {name: checksums(tree) for name, tree in items.items()},
        }
        args = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params, save_args=_save_args(state.params)),
            optimizer=ocp.args.StandardSave(items["optimizer"]),
            meta=ocp.args.JsonSave(content | {"checksum": json_checksum(content)}),
        )
        with self._write_errors():  # orbax reports here that the previous step could not be written
            self._manager.wait_until_finished()
            self._remove_failed_write(step)
            self._manager.save(step, args=args, force=True)

    def restore(self, step: int, model_config: ModelConfig, target: TrainState) -> TrainState:
        """The state of a step that was saved. Collective. Raises ValueError for another model or if it is damaged."""
        self.wait()
        with open_reader(str(self._manager.directory)) as manager:
            return _restore_state(manager, step, model_config, target)[0]

    def check_space(self, state: TrainState) -> None:
        """Raises OSError in one line if the disk of a local directory is too full for a checkpoint.

        Orbax would write until the disk is full, and report it by dozens of tracebacks of its threads.
        """
        folder = Path(self._manager.directory)
        if "://" in str(self._manager.directory) or not folder.exists():
            return
        needed = sum(x.nbytes for x in jax.tree.leaves(state))
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"no space left for a checkpoint in {folder}: it needs {needed / 1e6:,.1f} MB, and "
                f"{free / 1e6:,.1f} MB are free",
            )

    def _remove_failed_write(self, step: int) -> None:
        """Orbax cannot delete a temporary directory into which the threads of a failed write are still writing."""
        folder = Path(self._manager.directory)
        suffix = ".orbax-checkpoint-tmp"
        failed = folder / f"{step}{suffix}"
        # Before any write, orbax itself may be deleting directories of earlier runs.
        if self._a_write_failed and jax.process_index() == 0 and failed.exists():
            renamed = failed.rename(folder / f"{step}.{time.time_ns()}{suffix}")
            shutil.rmtree(renamed, ignore_errors=True)

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a full disk alone raises half a dozen types
            self._a_write_failed = True
            raise OSError(
                f"cannot write a checkpoint in {self._manager.directory} ({error_line(error)}); "
                "older checkpoints are intact"
            ) from error

    def wait(self) -> None:
        """Waits until everything is written. Raises OSError in one line if that fails."""
        with self._write_errors():
            self._manager.wait_until_finished()

    def check(self) -> None:
        """Raises OSError in one line if a write in the background has failed since the last call; does not wait."""
        with self._write_errors():
            self._manager.check_for_errors()

    def set_aside(self, step: int) -> bool:
        """Renames a step whose policy is broken to STEP.broken; whether there was one. Collective, after `wait`."""
        is_renamed = _rename(self._manager, step, "broken")
        self._manager.reload()
        return is_renamed

    def steps(self) -> list[int]:
        """The steps that are complete, newest first."""
        with open_reader(str(self._manager.directory)) as manager:
            return complete_steps(manager)

    @property
    def newest(self) -> int | None:
        """The newest step that is complete or being written."""
        return self._manager.latest_step()


def latest_step(directory: str | Path) -> int | None:
    """The newest complete step, or None."""
    with open_reader(directory) as manager:
        return max(complete_steps(manager), default=None)


def restore_latest(
    directory: str | Path, model_config: ModelConfig, target: TrainState, notify: Callable[[str], None]
) -> tuple[int, TrainState, dict[str, Any]]:
    """(step, state, meta) of the newest undamaged step. Collective: all hosts must call it.

    `target`: shapes, types and shardings (`update.abstract_state`). Any mesh and any number of hosts can restore, bit
    for bit, or cast to another `param_dtype`. A damaged step is renamed to STEP.damaged, `notify` receives the reason
    in one line, and the step before it is restored. Raises FileNotFoundError without a checkpoint, ValueError for
    another model, or if no step can be read; then none is renamed.
    """
    reasons: dict[int, str] = {}
    with open_reader(directory) as manager:
        for step in _steps_of_the_first_host(manager):
            try:
                state, meta = _restore_state(manager, step, model_config, target)
            except DamagedCheckpointError as error:
                reasons[step] = str(error)
                continue
            # Not before one was read: where memory or the network fails, no step can be read, and all are sound.
            for damaged, reason in reasons.items():
                notify(f"{reason}: renamed to {damaged}.damaged")
                _rename(manager, damaged, "damaged")
            return step, state, meta["run"]
    if not reasons:
        raise FileNotFoundError(f"no checkpoint in {directory}")
    raise ValueError(f"no checkpoint in {directory} can be read: {next(iter(reasons.values()))}")


def restore_params(directory: str | Path, model_config: ModelConfig, target: Params, step: int | None = None) -> Params:
    """The weights of `step`, by default the newest, with the shapes, types and shardings of `target`.

    Collective. Raises FileNotFoundError without that checkpoint, ValueError for another model or if it is damaged.
    """
    with open_reader(directory) as manager:
        step = select_step(manager, step)
        try:
            return restore_items(manager, step, model_config, {"params": target}).items["params"]
        except DamagedCheckpointError as error:
            older = [other for other in complete_steps(manager) if other < step]
            fix = f"move it away to continue from step {older[0]}" if older else "there is no older one"
            raise DamagedCheckpointError(f"{error}: {fix}") from error


def run_meta(directory: str | Path, model_config: ModelConfig, step: int | None = None) -> dict[str, Any]:
    """The `meta` that was saved with `step`, by default the newest. Raises as `restore_params`."""
    with open_reader(directory) as manager:
        return read_meta(manager, select_step(manager, step), model_config)["run"]


def _steps_of_the_first_host(manager: ocp.CheckpointManager) -> Iterator[int]:
    """Its complete steps, newest first, on every host: the cached listings of a bucket may differ. Collective."""
    own_steps = complete_steps(manager)
    while True:
        own_step = own_steps.pop(0) if own_steps else NO_STEP
        step = int(multihost_utils.broadcast_one_to_all(np.int32(own_step)))
        if step == NO_STEP:
            return
        yield step


def _restore_state(
    manager: ocp.CheckpointManager, step: int, model_config: ModelConfig, target: TrainState
) -> tuple[TrainState, dict[str, Any]]:
    """The state and meta of a step. Raises as `restore_items`."""
    items, meta = restore_items(manager, step, model_config, array_items(target))
    return TrainState(params=items["params"], **items["optimizer"]), meta


def _save_args(params: Params) -> Params:
    """Chunks of the files: one layer for stacked weights, up to MAX_CHUNK_BYTES for others.

    `shard_axes` splits an axis into single entries: applied to an embedding table it would write a chunk per token.
    """

    def save_args(path: Any, _: Any) -> ocp.SaveArgs:
        by_layer = path[0].key == "layers"
        return ocp.SaveArgs(chunk_byte_size=MAX_CHUNK_BYTES, shard_axes=(0,) if by_layer else ())

    return jax.tree.map_with_path(save_args, params)


def _rename(manager: ocp.CheckpointManager, step: int, reason: str) -> bool:
    """Renames a step, if it exists, to STEP.REASON, so that nothing restores it; whether it did.

    Collective: the first host renames, all wait for it. Hosts cache the listings of a bucket: only the first one looks.
    """
    is_renamed = False
    if jax.process_index() == 0 and (manager.directory / str(step)).exists():
        renamed = manager.directory / f"{step}.{reason}"
        if renamed.exists():
            renamed.rmtree()
        (manager.directory / str(step)).rename(renamed)
        is_renamed = True
    return bool(multihost_utils.broadcast_one_to_all(np.int32(is_renamed)))
