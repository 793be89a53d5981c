"""Checkpoints by orbax: a directory per step with three items.

    DIRECTORY/STEP/params      the weights; export and evaluation read nothing else but meta
    DIRECTORY/STEP/optimizer   the optimiser state and step
    DIRECTORY/STEP/meta        JSON: the model config, the data of the training loop, and checksums of everything

Orbax writes a step to a temporary directory and renames it, so a killed run leaves the older steps intact. It verifies
its index, but not the numbers: a flipped bit is read as another weight. So they are compared with checksums.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from jax.experimental import multihost_utils

from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.qwen import Params
from memsearcher_jax.training.checksums import checksums, slice_checksum, tree_paths
from memsearcher_jax.training.update import TrainState

ITEMS = ("params", "optimizer", "meta")
# A model may load weights that were saved with other values of these fields.
FREE_FIELDS = {"max_positions", "param_dtype", "compute_dtype", "attention", "remat", "path", "tokenizer", "adapter"}
MAX_CHUNK_BYTES = 64 << 20  # of a file; chunks are read one at a time
# Reads one chunk at a time: tensorstore holds everything in memory that it reads concurrently.
SEQUENTIAL_READS = {"file_io_concurrency": {"limit": 1}, "data_copy_concurrency": {"limit": 1}}


class DamagedCheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not match its checksums."""


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
            _absolute(directory),
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
        items = _array_items(state)
        content = {
            "model": dataclasses.asdict(model_config),
            "run": dict(meta),
            "array_checksums": {name: checksums(tree) for name, tree in items.items()},
        }
        args = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params, save_args=_save_args(state.params)),
            optimizer=ocp.args.StandardSave(items["optimizer"]),
            meta=ocp.args.JsonSave(content | {"checksum": _json_checksum(content)}),
        )
        with self._write_errors():  # orbax reports here that the previous step could not be written
            self._manager.wait_until_finished()
            self._remove_failed_write(step)
            self._manager.save(step, args=args, force=True)

    def restore(self, step: int, model_config: ModelConfig, target: TrainState) -> TrainState:
        """The state of a step that was saved. Collective. Raises ValueError for another model or if it is damaged."""
        self.wait()
        with _open_reader(str(self._manager.directory)) as manager:
            return _restore_state(manager, step, model_config, target)[0]

    def check_space(self, state: TrainState) -> None:
        """Raises OSError in one line if the disk of a local directory is too full for a checkpoint.

        Orbax would write until the disk is full, and report it by dozens of tracebacks of its threads.
        """
        folder = Path(self._manager.directory)
        if "://" in str(self._manager.directory) or not folder.exists():
            return
        needed, free = sum(x.nbytes for x in jax.tree.leaves(state)), shutil.disk_usage(folder).free
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"no space left for a checkpoint in {folder}: it needs {needed / 1e6:,.1f} MB, and "
                f"{free / 1e6:,.1f} MB are free",
            )

    def _remove_failed_write(self, step: int) -> None:
        """Orbax cannot delete a temporary directory into which the threads of a failed write are still writing."""
        folder, suffix = Path(self._manager.directory), ".orbax-checkpoint-tmp"
        failed = folder / f"{step}{suffix}"
        # Before any write, orbax itself may be deleting directories of earlier runs.
        if self._a_write_failed and jax.process_index() == 0 and failed.exists():
            shutil.rmtree(failed.rename(folder / f"{step}.{time.time_ns()}{suffix}"), ignore_errors=True)

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a full disk alone raises half a dozen types
            self._a_write_failed = True
            raise OSError(
                f"cannot write a checkpoint in {self._manager.directory} ({_reason(error)}); "
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

    def steps(self) -> list[int]:
        """The steps that are complete, newest first."""
        with _open_reader(str(self._manager.directory)) as manager:
            return _steps(manager)

    @property
    def newest(self) -> int | None:
        """The newest step that is complete or being written."""
        return self._manager.latest_step()


def latest_step(directory: str | Path) -> int | None:
    """The newest complete step, or None."""
    with _open_reader(directory) as manager:
        return max(_steps(manager), default=None)


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
    with _open_reader(directory) as manager:
        steps = iter(_steps(manager))
        # The first host's, because the cached listings of a bucket may differ.
        while (step := int(multihost_utils.broadcast_one_to_all(np.int32(next(steps, -1))))) >= 0:
            try:
                state, meta = _restore_state(manager, step, model_config, target)
            except DamagedCheckpointError as error:
                reasons[step] = str(error)
                continue
            # Not before one was read: where memory or the network fails, no step can be read, and all are sound.
            for damaged, reason in reasons.items():
                notify(f"{reason}: renamed to {damaged}.damaged")
                _rename_damaged(manager, damaged)
            return step, state, meta["run"]
    if not reasons:
        raise FileNotFoundError(f"no checkpoint in {directory}")
    raise ValueError(f"no checkpoint in {directory} can be read: {next(iter(reasons.values()))}")


def restore_params(directory: str | Path, model_config: ModelConfig, target: Params, step: int | None = None) -> Params:
    """The weights of `step`, by default the newest, with the shapes, types and shardings of `target`.

    Collective. Raises FileNotFoundError without that checkpoint, ValueError for another model or if it is damaged.
    """
    with _open_reader(directory) as manager:
        step = _select_step(manager, step)
        try:
            return _restore_items(manager, step, model_config, {"params": target})[0]["params"]
        except DamagedCheckpointError as error:
            older = [other for other in _steps(manager) if other < step]
            fix = f"move it away to continue from step {older[0]}" if older else "there is no older one"
            raise DamagedCheckpointError(f"{error}: {fix}") from error


def run_meta(directory: str | Path, model_config: ModelConfig, step: int | None = None) -> dict[str, Any]:
    """The `meta` that was saved with `step`, by default the newest. Raises as `restore_params`."""
    with _open_reader(directory) as manager:
        return _read_meta(manager, _select_step(manager, step), model_config)["run"]


class ParamsReader:
    """Reads the newest weights from disk one tensor at a time, to convert them in little memory.

    Raises as `restore_params`, but for damaged numbers only in `check`.
    """

    def __init__(self, directory: str | Path, model_config: ModelConfig):
        with _open_reader(directory) as manager:
            step = _select_step(manager)
            self._checksums: dict[str, int] = _read_meta(manager, step, model_config)["array_checksums"]["params"]
            folder = str(manager.directory / str(step) / "params")
        # tensorstore takes URLs, in which a folder named exp#1 or 50% would be another one.
        self._url = folder if "://" in folder else f"file://{quote(folder)}"
        self._context = tensorstore.Context(SEQUENTIAL_READS)
        self._stores: dict[str, tensorstore.TensorStore] = {}
        self._sums = Counter[str]()

    def read(self, path: str, layer: int | None) -> np.ndarray:
        """One weight, such as "layers.wq", or one layer of it, in the type that was saved."""
        try:
            if path not in self._stores:
                spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": self._url, "path": f"{path}/"}}
                self._stores[path] = tensorstore.open(spec, open=True, read=True, context=self._context).result()
            store = self._stores[path]
            value = np.asarray((store if layer is None else store[layer]).read().result())
        except Exception as error:  # tensorstore raises many types
            raise ValueError(f"{self._url} cannot be read: {path}: {_reason(error)}") from error
        self._sums[path] += slice_checksum(value, (layer or 0) * value.size)
        return value

    def check(self) -> None:
        """Raises ValueError if a checksum differs. Call it after every weight was read exactly once."""
        for path, checksum in self._checksums.items():
            if self._sums[path] % 2**32 != checksum:
                raise ValueError(f"{self._url} is damaged: the checksum of {path} differs")


def _array_items(state: TrainState) -> dict[str, Any]:
    return {"params": state.params, "optimizer": {"step": state.step, "opt_state": state.opt_state}}


def _save_args(params: Params) -> Params:
    """Chunks of the files: one layer for stacked weights, up to MAX_CHUNK_BYTES for others.

    `shard_axes` splits an axis into single entries: applied to an embedding table it would write a chunk per token.
    """
    return jax.tree.map_with_path(
        lambda path, _: ocp.SaveArgs(
            chunk_byte_size=MAX_CHUNK_BYTES, shard_axes=(0,) if path[0].key == "layers" else ()
        ),
        params,
    )


def _absolute(directory: str | Path) -> str:
    """Orbax needs absolute paths or URLs."""
    return str(directory) if "://" in str(directory) else str(Path(directory).expanduser().absolute())


def _open_reader(directory: str | Path) -> ocp.CheckpointManager:
    """Each host reads on its own: if one cannot read a file, the others must not wait for it."""
    host, options = jax.process_index(), ocp.options.MultiprocessingOptions()
    if jax.process_count() > 1:
        options = ocp.options.MultiprocessingOptions(host, {host}, barrier_sync_key_prefix=f"host{host}")
    manager_options = ocp.CheckpointManagerOptions(read_only=True, multiprocessing_options=options)
    return ocp.CheckpointManager(_absolute(directory), options=manager_options, item_names=ITEMS)


def _steps(manager: ocp.CheckpointManager) -> list[int]:
    """Newest first."""
    return sorted(manager.all_steps(), reverse=True)


def _select_step(manager: ocp.CheckpointManager, step: int | None = None) -> int:
    """`step`, by default the newest. Raises FileNotFoundError if it is absent."""
    steps = _steps(manager)
    if not steps:
        raise FileNotFoundError(f"no checkpoint in {manager.directory}")
    if step is None or step in steps:
        return steps[0] if step is None else step
    raise FileNotFoundError(
        f"{manager.directory} no longer holds step {step}, only {', '.join(map(str, steps))}: "
        "raise rl.keep_checkpoints of that run, or export the weights to train from"
    )


def _rename_damaged(manager: ocp.CheckpointManager, step: int) -> None:
    """Renames a step to STEP.damaged. Collective: the first host renames, all wait for it."""
    if jax.process_index() == 0:
        renamed = manager.directory / f"{step}.damaged"
        if renamed.exists():
            renamed.rmtree()
        (manager.directory / str(step)).rename(renamed)
    multihost_utils.sync_global_devices(f"step {step} is renamed")


def _restore_state(
    manager: ocp.CheckpointManager, step: int, model_config: ModelConfig, target: TrainState
) -> tuple[TrainState, dict[str, Any]]:
    """The state and meta of a step. Raises as `_restore_items`."""
    items, meta = _restore_items(manager, step, model_config, _array_items(target))
    return TrainState(params=items["params"], **items["optimizer"]), meta


def _restore_items(
    manager: ocp.CheckpointManager, step: int, model_config: ModelConfig, targets: Mapping[str, Params]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the items of a step in the types of `targets`, its meta). Collective.

    Raises DamagedCheckpointError on all hosts if one host cannot read it, or if a checksum differs.
    """
    folder, meta, reason = manager.directory / str(step), {}, ""
    restored: Any = None
    try:
        meta = _read_meta(manager, step, model_config)
        for item, tree in targets.items():
            if missing := sorted({*tree_paths(tree)} ^ meta["array_checksums"][item].keys()):
                raise ValueError(
                    f"{folder} was written by another version, or with other settings: "
                    f"its {item} and that of this run differ in {missing[0]}"
                )
        # With the types that were saved, whose bits the checksums describe.
        dtype = meta["model"]["param_dtype"]
        saved = jax.tree.map(
            lambda x: x.update(dtype=dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, dict(targets)
        )
        args = {item: ocp.args.StandardRestore(tree) for item, tree in saved.items()}
        restored = _restore(manager, step, **args)
    except DamagedCheckpointError as error:
        reason = str(error)
    failed = multihost_utils.process_allgather(np.int32(bool(reason))).reshape(-1)
    if failed.any():
        raise DamagedCheckpointError(reason or f"host {int(failed.argmax())} cannot read checkpoint {folder}")
    for item in targets:
        for path, checksum in checksums(restored[item]).items():
            if meta["array_checksums"][item][path] != checksum:
                raise DamagedCheckpointError(f"checkpoint {folder} is damaged: the checksum of {item} {path} differs")
    items = {item: restored[item] for item in targets}
    return jax.tree.map(lambda like, x: x.astype(like.dtype), dict(targets), items), meta


def _json_checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_meta(manager: ocp.CheckpointManager, step: int, model_config: ModelConfig) -> dict[str, Any]:
    """Raises DamagedCheckpointError, or ValueError if the checkpoint is of another model."""
    meta = _restore(manager, step, meta=ocp.args.JsonRestore()).meta
    folder = manager.directory / str(step)
    if not isinstance(meta, dict) or not {"model", "run", "array_checksums", "checksum"} <= meta.keys():
        raise DamagedCheckpointError(f"checkpoint {folder} was not written by this version")
    if meta.pop("checksum") != _json_checksum(meta):
        raise DamagedCheckpointError(f"checkpoint {folder} is damaged: the checksum of meta differs")
    ours, saved = json.loads(json.dumps(dataclasses.asdict(model_config))), meta["model"]  # both as JSON has them
    differences = [
        f"{name} is {saved.get(name)} there and {value} here"
        for name, value in ours.items()
        if name not in FREE_FIELDS and saved.get(name) != value
    ]
    if differences:
        raise ValueError(f"{folder} holds another model: {'; '.join(differences)}")
    return meta


def _restore(manager: ocp.CheckpointManager, step: int, **items: ocp.args.CheckpointArgs) -> ocp.args.Composite:
    try:
        return cast(ocp.args.Composite, manager.restore(step, args=ocp.args.Composite(**items)))
    except Exception as error:  # a damaged file raises any of a dozen types, from json's to tensorstore's
        raise DamagedCheckpointError(
            f"checkpoint {manager.directory / str(step)} cannot be read ({_reason(error)})"
        ) from error


def _reason(error: Exception) -> str:
    """The error in one line: its message may be empty, or have many lines."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
