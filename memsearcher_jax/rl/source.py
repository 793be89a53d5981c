"""Where weights come from: a Hugging Face folder, or the folder of a run of ours with its newest checkpoint.

A run's folder is complete in itself:

    run.json        the run's config
    tokenizer/      a copy of the tokenizer's files
    checkpoints/    orbax, a folder per step
    metrics.jsonl   tensorboard/   trajectories/   curves.png
    data/  index/   built at the start unless the config names built ones
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
from jax.sharding import Mesh

from memsearcher_jax.config import RunConfig, from_dict, to_dict
from memsearcher_jax.model import qwen, sharding, weights
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.training import checkpoint

RUN_FILE, TOKENIZER, CHECKPOINTS = "run.json", "tokenizer", "checkpoints"


def is_run(folder: str | Path) -> bool:
    """Whether the folder is a run of ours."""
    return (Path(folder) / RUN_FILE).is_file()


def read_run_config(folder: str | Path) -> RunConfig:
    """The config that a run stored. Raises FileNotFoundError or ValueError in one line."""
    file = Path(folder) / RUN_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no run: there is no {RUN_FILE} in it")
    try:
        return from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def open_run_folder(folder: Path, config: RunConfig, tokenizer_folder: str) -> None:
    """Writes what makes the folder a run's, the config last: a folder without it is no run."""
    folder.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(tokenizer_folder, folder / TOKENIZER)
    beside = folder / f"{RUN_FILE}.partial"
    beside.write_text(json.dumps(to_dict(config), indent=2) + "\n", encoding="utf-8")
    beside.rename(folder / RUN_FILE)


def copy_tokenizer(source: str, target: Path) -> None:
    """Copies the files by which transformers and we read a tokenizer."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (Path(source) / name).is_file() and Path(source) != target:
            shutil.copyfile(Path(source) / name, target / name)


def tokenizer_folder(folder: str | Path) -> str:
    """Where the tokenizer of these weights is."""
    return str(Path(folder) / TOKENIZER) if is_run(folder) else str(folder)


def read_model_config(folder: str | Path) -> ModelConfig:
    """The shape of the weights in the folder."""
    return read_run_config(folder).model if is_run(folder) else weights.read_config(folder)


def load_params(folder: str | Path, model: ModelConfig, mesh: Mesh, dtype: str) -> dict:
    """The weights on `mesh` as `dtype`. Raises ValueError or OSError in one line."""
    if not is_run(folder):
        return weights.load(folder, mesh=mesh, dtype=dtype)[1]
    shapes = jax.eval_shape(lambda key: qwen.init(key, model), jax.random.key(0))
    target = jax.tree.map(
        lambda shape, place: jax.ShapeDtypeStruct(shape.shape, dtype, sharding=place),
        shapes,
        sharding.param_shardings(model, mesh),
    )
    return checkpoint.restore_params(Path(folder) / CHECKPOINTS, model, target)
