"""Weights from and to Hugging Face folders: safetensors only, piece by piece, never a second copy of the model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from memsearcher_jax.model import hf_tensors, qwen, sharding
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.hf_config import TOKENIZER_FILES, config_json, generation_json, read_config
from memsearcher_jax.model.hf_tensors import INDEX_FILE, SINGLE_FILE, Tensor, dotted

SAME_MODEL = (
    *("vocab_size", "embed_size", "ffn_size", "layers", "heads", "kv_heads", "head_size"),
    *("rope_theta", "norm_eps", "tied", "family"),
)
"""Fields of which any difference means other weights, or other numbers from the same ones."""


SHARD_BYTES = 5_000_000_000  # of one file


class SavesItself(Protocol):
    """A tokenizer that writes its own files, as those of transformers do."""

    def save_pretrained(self, directory: str) -> Any: ...


def load(directory: str | Path, *, mesh: Mesh | None = None, dtype: str | None = None) -> tuple[ModelConfig, dict]:
    """(config, params) of a Hugging Face folder; `config.param_dtype` is the type of the params.

    `mesh` spreads each weight as `sharding.param_shardings` says, and a host reads only what its devices hold;
    without a mesh all goes to one device. `dtype` (float32 or bfloat16) is by default what config.json declares.
    Beside what lies on the devices, the host holds one weight at a time.
    Raises FileNotFoundError or ValueError, in one line and before reading any weight, for a folder that is not whole.
    """
    directory = Path(directory)
    config = read_config(directory)
    if dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"weights cannot be loaded as {dtype}: choose float32 or bfloat16")
    config = replace(config, param_dtype=dtype or config.param_dtype)
    if mesh is not None:
        sharding.check_divides(config, dict(mesh.shape))
    with ExitStack() as stack:
        files = hf_tensors.open_files(directory, stack)
        hf_tensors.check(directory, config, files)

        def build(path: tuple, weight: qwen.Weight) -> jax.Array:
            lies = sharding.named_sharding(mesh, weight.axes) if mesh else SingleDeviceSharding(jax.local_devices()[0])
            read = partial(hf_tensors.read, files, dotted(path), weight)
            return jax.make_array_from_callback(weight.shape, lies, read, dtype=weight.dtype)

        return config, jax.tree.map_with_path(build, qwen.declared(config))


def check_files(directory: str | Path) -> None:
    """Raises FileNotFoundError or ValueError as `load` would, and reads no weight."""
    with ExitStack() as stack:
        hf_tensors.check(Path(directory), read_config(directory), hf_tensors.open_files(Path(directory), stack))


def save(
    directory: str | Path,
    config: ModelConfig,
    params: dict,
    tokenizer: SavesItself | str | Path | None,
    *,
    end_ids: Sequence[int] = (),
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a folder that transformers loads: config.json, safetensors in the type of `params`, the tokenizer's files.

    `tokenizer` is a folder with tokenizer.json, an object with `save_pretrained`, or None for none. `end_ids` are the
    tokens that end a reply, the usual one first: transformers needs them in order to stop there.
    A model over `max_shard_bytes` goes into several files with an index; one tensor is on the host at a time.
    The folder appears whole or not at all. Raises ValueError for one that holds something already, and for params
    that are not this config's or not all on this host.
    """
    config = replace(config, param_dtype=_check_params(config, params))
    leaves = {dotted(path): weight for path, weight in jax.tree.leaves_with_path(params)}
    fetch = partial(_fetch, leaves)
    save_from(directory, config, fetch, tokenizer, end_ids=end_ids, max_shard_bytes=max_shard_bytes)


def save_from(
    directory: str | Path,
    config: ModelConfig,
    fetch: Callable[[str, int | None], np.ndarray],
    tokenizer: SavesItself | str | Path | None,
    *,
    end_ids: Sequence[int] = (),
    max_shard_bytes: int = SHARD_BYTES,
    check: Callable[[], None] = lambda: None,
) -> None:
    """`save`, of weights that are nowhere whole.

    `fetch` gives one of ours by its path, or one layer of a stacked one, and is asked for each of them once; it is
    written in `config.param_dtype`. `check` is called when all are written and the folder has not appeared yet.
    """
    directory = Path(directory).resolve()
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not empty: remove it or choose another folder")
    write_tokenizer = _tokenizer_writer(tokenizer)
    beside = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    beside.mkdir(parents=True)
    try:
        _write_json(beside / "config.json", config_json(config, end_ids))
        if end_ids:
            _write_json(beside / "generation_config.json", generation_json(end_ids))
        _write_tensors(beside, config, fetch, max_shard_bytes)
        check()
        write_tokenizer(beside)
        beside.rename(directory)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def check_same_model(expected: ModelConfig, found: ModelConfig) -> None:
    """Raises ValueError that names the first field in which two models differ; settings of a run may differ."""
    for name in SAME_MODEL:
        ours, theirs = getattr(expected, name), getattr(found, name)
        if ours != theirs:
            raise ValueError(f"a checkpoint of another model: {name} is {theirs} there, but {ours} in this run")


def _write_tensors(
    directory: Path, config: ModelConfig, fetch: Callable[[str, int | None], np.ndarray], max_shard_bytes: int
) -> None:
    shards = list(_shards(hf_tensors.tensors(config), max_shard_bytes))
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        hf_tensors.write_file(directory / file, shard, config.param_dtype, fetch)
        weight_map |= {tensor.name: file for tensor in shard}
    if len(shards) > 1:
        total = sum(tensor.nbytes for shard in shards for tensor in shard)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(directory / INDEX_FILE, index)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _fetch(weights: dict[str, jax.Array | np.ndarray], path: str, layer: int | None) -> np.ndarray:
    """Of a stacked weight only this layer leaves the device."""
    return np.asarray(weights[path] if layer is None else weights[path][layer])


def _shards(tensors: list[Tensor], max_bytes: int) -> Iterator[list[Tensor]]:
    """Runs of at most `max_bytes`, in order; a tensor over it has a run of its own."""
    run, run_bytes = [], 0
    for tensor in tensors:
        if run and run_bytes + tensor.nbytes > max_bytes:
            yield run
            run, run_bytes = [], 0
        run.append(tensor)
        run_bytes += tensor.nbytes
    yield run


def _check_params(config: ModelConfig, params: dict) -> str:
    """The one type of all weights. Raises ValueError if they are not this config's, or cannot be written from here."""
    expected = {dotted(path): weight.shape for path, weight in jax.tree.leaves_with_path(qwen.declared(config))}
    found = {dotted(path): weight for path, weight in jax.tree.leaves_with_path(params)}
    for path in sorted(expected.keys() | found.keys()):
        shape = tuple(found[path].shape) if path in found else None
        if shape != expected.get(path):
            raise ValueError(f"not the weights of this config: {path} has shape {shape}, not {expected.get(path)}")
        if isinstance(found[path], jax.Array) and not found[path].is_fully_addressable:
            raise ValueError(f"{path} is spread over several hosts: save a checkpoint and export that on one host")
    dtypes = sorted({weight.dtype.name for weight in found.values()})
    if dtypes not in (["float32"], ["bfloat16"]):
        raise ValueError(f"weights of type {' and '.join(dtypes)} cannot be saved: cast all to float32 or bfloat16")
    return dtypes[0]


def _tokenizer_writer(tokenizer: SavesItself | str | Path | None) -> Callable[[Path], None]:
    """Checks the tokenizer now and gives what writes it later, so that nothing fails behind a long write."""
    if tokenizer is None:
        return lambda directory: None
    if not isinstance(tokenizer, str | Path):
        return lambda directory: tokenizer.save_pretrained(str(directory))
    source = Path(tokenizer)
    if not (source / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{source} has no tokenizer.json: name a tokenizer's folder")
    present = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]

    def copy(directory: Path) -> None:
        for file in present:
            shutil.copyfile(file, directory / file.name)

    return copy
