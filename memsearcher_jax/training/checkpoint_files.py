"""One checkpoint on disk: its items, the checksums of what it holds, and reading it.

    DIRECTORY/STEP/params      the weights; export and evaluation read nothing else but meta
    DIRECTORY/STEP/optimizer   the optimiser state and step
    DIRECTORY/STEP/meta        JSON: the model config, the data of the training loop, and checksums of everything

Orbax writes a step to a temporary directory and renames it, so a killed run leaves the older steps intact. It verifies
its index, but not the numbers: a flipped bit is read as another weight. So they are compared with checksums.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.qwen import Params
from memsearcher_jax.training.checksums import checksums, tree_paths
from memsearcher_jax.training.update import TrainState

ITEMS = ("params", "optimizer", "meta")
# A model may load weights that were saved with other values of these fields.
FREE_FIELDS = {"max_positions", "param_dtype", "compute_dtype", "attention", "remat", "path", "tokenizer", "adapter"}


class DamagedCheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not match its checksums."""


def open_reader(directory: str | Path) -> ocp.CheckpointManager:
    """Each host reads on its own: if one cannot read a file, the others must not wait for it."""
    options = ocp.options.MultiprocessingOptions()
    if jax.process_count() > 1:
        host = jax.process_index()
        options = ocp.options.MultiprocessingOptions(host, {host}, barrier_sync_key_prefix=f"host{host}")
    manager_options = ocp.CheckpointManagerOptions(read_only=True, multiprocessing_options=options)
    return ocp.CheckpointManager(absolute(directory), options=manager_options, item_names=ITEMS)


def absolute(directory: str | Path) -> str:
    """Orbax needs absolute paths or URLs."""
    return str(directory) if "://" in str(directory) else str(Path(directory).expanduser().absolute())


def complete_steps(manager: ocp.CheckpointManager) -> list[int]:
    """Newest first."""
    return sorted(manager.all_steps(), reverse=True)


def select_step(manager: ocp.CheckpointManager, step: int | None = None) -> int:
    """`step`, by default the newest. Raises FileNotFoundError if it is absent."""
    steps = complete_steps(manager)
    if not steps:
        raise FileNotFoundError(f"no checkpoint in {manager.directory}")
    if step is None:
        return steps[0]
    if step in steps:
        return step
    raise FileNotFoundError(
        f"{manager.directory} no longer holds step {step}, only {', '.join(map(str, steps))}: "
        "raise rl.keep_checkpoints of that run, or export the weights to train from"
    )


class RestoredItems(NamedTuple):
    """What was read of a checkpoint."""

    items: dict[str, Any]
    meta: dict[str, Any]


def array_items(state: TrainState) -> dict[str, Any]:
    """The items of a train state that are arrays."""
    return {"params": state.params, "optimizer": {"step": state.step, "opt_state": state.opt_state}}


def read_meta(manager: ocp.CheckpointManager, step: int, model_config: ModelConfig) -> dict[str, Any]:
    """The item `meta` of a step.

    Raises DamagedCheckpointError, or ValueError if the checkpoint is of another model.
    """
    meta = _restore(manager, step, meta=ocp.args.JsonRestore()).meta
    folder = manager.directory / str(step)
    if not isinstance(meta, dict) or not {"model", "run", "array_checksums", "checksum"} <= meta.keys():
        raise DamagedCheckpointError(f"checkpoint {folder} was not written by this version")
    if meta.pop("checksum") != json_checksum(meta):
        raise DamagedCheckpointError(f"checkpoint {folder} is damaged: the checksum of meta differs")
    saved_model = meta["model"]
    our_model = json.loads(json.dumps(dataclasses.asdict(model_config)))  # with JSON's types, as the other
    differences = []
    for name, value in our_model.items():
        if name not in FREE_FIELDS and saved_model.get(name) != value:
            differences.append(f"{name} is {saved_model.get(name)} there and {value} here")
    if differences:
        raise ValueError(f"{folder} holds another model: {'; '.join(differences)}")
    return meta


def restore_items(
    manager: ocp.CheckpointManager, step: int, model_config: ModelConfig, targets: Mapping[str, Params]
) -> RestoredItems:
    """The items of a step that `targets` names, in the types of the targets. Collective.

    Raises DamagedCheckpointError on all hosts if one host cannot read it, or if a checksum differs.
    """
    folder = manager.directory / str(step)
    meta: dict[str, Any] = {}
    as_saved: dict[str, Any] = {}
    damage = ""
    try:
        meta = read_meta(manager, step, model_config)
        for item, target in targets.items():
            _check_same_arrays(folder, meta, item, target)
        as_saved = _read_arrays(manager, step, meta, targets)
    except DamagedCheckpointError as error:
        damage = str(error)
    is_damaged_by_host = multihost_utils.process_allgather(np.int32(bool(damage))).reshape(-1)
    if is_damaged_by_host.any():
        raise DamagedCheckpointError(
            damage or f"host {int(is_damaged_by_host.argmax())} cannot read checkpoint {folder}"
        )
    for item in targets:
        for path, checksum in checksums(as_saved[item]).items():
            if meta["array_checksums"][item][path] != checksum:
                raise DamagedCheckpointError(f"checkpoint {folder} is damaged: the checksum of {item} {path} differs")
    items = jax.tree.map(lambda target, x: x.astype(target.dtype), dict(targets), as_saved)
    return RestoredItems(items, meta)


def _check_same_arrays(folder: Any, meta: Mapping[str, Any], item: str, target: Params) -> None:
    """Raises ValueError if the item has other arrays than the target."""
    saved_paths = meta["array_checksums"][item].keys()
    different = sorted({*tree_paths(target)} ^ saved_paths)
    if different:
        raise ValueError(
            f"{folder} was written by another version, or with other settings: "
            f"its {item} and that of this run differ in {different[0]}"
        )


def _read_arrays(
    manager: ocp.CheckpointManager, step: int, meta: Mapping[str, Any], targets: Mapping[str, Params]
) -> dict[str, Any]:
    """The items in the shardings of `targets`, and in the types that were saved, whose bits the checksums describe."""
    dtype = meta["model"]["param_dtype"]

    def as_saved(target: Any) -> Any:
        return target.update(dtype=dtype) if jnp.issubdtype(target.dtype, jnp.floating) else target

    args = {item: ocp.args.StandardRestore(jax.tree.map(as_saved, target)) for item, target in targets.items()}
    restored = _restore(manager, step, **args)
    return {item: restored[item] for item in targets}


def _restore(manager: ocp.CheckpointManager, step: int, **items: ocp.args.CheckpointArgs) -> ocp.args.Composite:
    try:
        return cast(ocp.args.Composite, manager.restore(step, args=ocp.args.Composite(**items)))
    except Exception as error:  # a damaged file raises any of a dozen types, from json's to tensorstore's
        raise DamagedCheckpointError(
            f"checkpoint {manager.directory / str(step)} cannot be read ({error_line(error)})"
        ) from error


def json_checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def error_line(error: Exception) -> str:
    """The error in one line: its message may be empty, or have many lines."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
