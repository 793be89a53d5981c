"""Where weights come from: a Hugging Face folder, or the folder of a run of ours with its newest checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from memsearcher_jax.model import qwen, sharding, weights
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.rl.run_folder import checkpoints_of, is_run, located, read_run_config
from memsearcher_jax.training import checkpoint


def check_weights(folder: str | Path, model: ModelConfig) -> None:
    """Raises ValueError or OSError, in one line, unless the folder is whole and holds this model. Reads no weight."""
    if not is_run(folder):
        folder = located(folder)
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"{folder} is neither a run's folder (no run.json) nor a Hugging Face model (no config.json)"
            )
        _check_same_model(folder, model, weights.read_config(folder))
        weights.check_files(folder)
        return
    _check_same_model(folder, model, read_run_config(folder).model)
    if newest_step(folder) is None:
        raise FileNotFoundError(f"{folder} holds no checkpoint yet: go on with that run, or name other weights")


def newest_step(folder: str | Path) -> int | None:
    """The step of the weights in a run's folder; None for other weights, and for a run without a checkpoint."""
    return checkpoint.latest_step(checkpoints_of(folder)) if is_run(folder) else None


def load_params(folder: str | Path, model: ModelConfig, mesh: Mesh, dtype: str) -> dict:
    """The weights on `mesh` as `dtype`. Raises ValueError or OSError in one line."""
    if not is_run(folder):
        return weights.load(located(folder), mesh=mesh, dtype=dtype)[1]
    target = jax.tree.map(
        lambda weight, place: jax.ShapeDtypeStruct(weight.shape, dtype, sharding=place),
        qwen.declared(model),
        sharding.param_shardings(model, mesh),
    )
    return checkpoint.restore_params(checkpoints_of(folder), model, target)


def export(
    folder: str | Path,
    model: ModelConfig,
    out: Path,
    dtype: str,
    tokenizer: str,
    end_ids: Sequence[int],
    max_shard_bytes: int,
) -> None:
    """Writes these weights as `out`, a Hugging Face folder, with the tokenizer in the folder `tokenizer`.

    A run's weights go from file to file, a tensor at a time. Raises ValueError or OSError in one line.
    """
    model = replace(model, param_dtype=dtype)
    rest = {"end_ids": end_ids, "max_shard_bytes": max_shard_bytes}
    if is_run(folder):
        saved = checkpoint.open_params(checkpoints_of(folder), model)
        weights.save_from(out, model, saved.read, tokenizer, **rest, check=saved.check)
    else:
        _, params = weights.load(located(folder), dtype=dtype)
        weights.save(out, model, params, tokenizer, **rest)


def _check_same_model(folder: str | Path, ours: ModelConfig, theirs: ModelConfig) -> None:
    try:
        weights.check_same_model(ours, theirs)
    except ValueError as error:
        raise ValueError(f"{folder} holds {error}: choose its preset with --config, or other weights") from error
