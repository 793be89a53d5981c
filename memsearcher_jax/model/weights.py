"""Decoder weights from and to Hugging Face folders: safetensors only, never a second copy of the model."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.hf_config import TOKENIZER_FILES, config_json, read_config, write_json
from memsearcher_jax.model.qwen import Params, ParamSpec, param_path
from memsearcher_jax.model.safetensors_files import INDEX_FILE, Files, check_tensors, finite, open_files, write_file

NAMES = {
    "embed": "model.embed_tokens.weight",
    "layers.attention_norm": "model.layers.{}.input_layernorm.weight",
    "layers.wq": "model.layers.{}.self_attn.q_proj.weight",
    "layers.wk": "model.layers.{}.self_attn.k_proj.weight",
    "layers.wv": "model.layers.{}.self_attn.v_proj.weight",
    "layers.wo": "model.layers.{}.self_attn.o_proj.weight",
    "layers.bq": "model.layers.{}.self_attn.q_proj.bias",
    "layers.bk": "model.layers.{}.self_attn.k_proj.bias",
    "layers.bv": "model.layers.{}.self_attn.v_proj.bias",
    "layers.q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "layers.k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "layers.ffn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "layers.gate": "model.layers.{}.mlp.gate_proj.weight",
    "layers.up": "model.layers.{}.mlp.up_proj.weight",
    "layers.down": "model.layers.{}.mlp.down_proj.weight",
    "final_norm": "model.norm.weight",
    "unembed": "lm_head.weight",
}
"""Parameter path -> tensor name, in which {} is the layer; a model has those of its family."""

SHARD_BYTES = 5_000_000_000

ReadWeight = Callable[[str, int | None], np.ndarray]
"""(parameter path, layer or None) -> a whole weight, or one layer of a stacked one."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of the files: a whole weight, or one layer of a stacked one."""

    name: str
    path: str  # of the weight
    layer: int | None
    shape: tuple[int, ...]
    nbytes: int  # in the type of the config


def load(directory: str | Path, *, mesh: Mesh | None = None, dtype: str | None = None) -> tuple[ModelConfig, Params]:
    """(config, params) of a Hugging Face folder; `config.param_dtype` is the type of the params.

    `mesh` shards each weight as `sharding.param_shardings`, and a host reads only what its devices hold; without a mesh
    all weights go to one device. `dtype` (float32 or bfloat16) defaults to what config.json declares. The host holds
    one weight at a time. Raises FileNotFoundError or ValueError, in one line, for an incomplete folder, before it reads
    any weight but a tied output layer, and for numbers that are not finite.
    """
    directory = Path(directory)
    config = read_config(directory)
    config = replace(config, param_dtype=dtype or config.param_dtype)
    if mesh is not None:
        sharding.check_divides(config, dict(mesh.shape))
    with ExitStack() as stack:
        files = open_files(directory, stack)
        _check_files(directory, config, files)

        def load_weight(path: tuple, spec: ParamSpec) -> jax.Array:
            target = sharding.named_sharding(mesh, spec.axes) if mesh else SingleDeviceSharding(jax.local_devices()[0])
            weight = param_path(path)

            def read(index: tuple[slice, ...] | None) -> np.ndarray:
                return finite(directory, NAMES[weight], read_shard(files, weight, spec, index))

            return jax.make_array_from_callback(spec.shape, target, read, dtype=spec.dtype)

        return config, jax.tree.map_with_path(load_weight, qwen.param_specs(config))


def check_files(directory: str | Path) -> None:
    """Raises FileNotFoundError or ValueError as `load` does, and reads no weights but those that it compares."""
    directory = Path(directory)
    with ExitStack() as stack:
        _check_files(directory, read_config(directory), open_files(directory, stack))


def save(
    directory: str | Path,
    config: ModelConfig,
    params: Params,
    tokenizer: Any,
    *,
    end_ids: Sequence[int] = (),
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a folder that transformers loads: config.json, safetensors in the type of `params`, the tokenizer's files.

    `tokenizer` is a folder with tokenizer.json, an object with `save_pretrained`, or None. `end_ids` are the tokens
    that end a reply, the usual one first: transformers needs them to stop there.
    A model over `max_shard_bytes` is split into several files with an index; one tensor is on the host at a time.
    The folder appears complete or not at all. Raises ValueError for a folder that is not empty, and for params that do
    not match the config or are not all on this host.
    """
    weights = {param_path(path): weight for path, weight in jax.tree.leaves_with_path(params)}
    config = replace(config, param_dtype=_check_params(config, weights))

    def read(path: str, layer: int | None) -> np.ndarray:
        return np.asarray(weights[path] if layer is None else weights[path][layer])

    save_streamed(directory, config, read, tokenizer, end_ids=end_ids, max_shard_bytes=max_shard_bytes)


def save_streamed(
    directory: str | Path,
    config: ModelConfig,
    read: ReadWeight,
    tokenizer: Any,
    *,
    end_ids: Sequence[int] = (),
    max_shard_bytes: int = SHARD_BYTES,
    verify: Callable[[], None] = lambda: None,
) -> None:
    """`save` for weights that are read one at a time: `read` is called once for each tensor.

    Weights are written in `config.param_dtype`. `verify` is called after the last one, before the folder appears.
    """
    directory = Path(directory).resolve()
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not empty: remove it or choose another folder")
    if isinstance(tokenizer, str | Path) and not (Path(tokenizer) / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{tokenizer} has no tokenizer.json: name a tokenizer's folder")
    partial_dir = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    shutil.rmtree(partial_dir, ignore_errors=True)  # of a killed process: a container's have the same id every time
    partial_dir.mkdir(parents=True)
    try:
        write_json(partial_dir / "config.json", config_json(config, end_ids))
        _write_tensors(partial_dir, config, read, max_shard_bytes)
        verify()
        _write_tokenizer(partial_dir, tokenizer)
        if end_ids:  # in place of the tokenizer's own file
            generation = {"eos_token_id": list(end_ids), "pad_token_id": end_ids[-1]}
            write_json(partial_dir / "generation_config.json", generation)
        partial_dir.rename(directory)
    except BaseException:
        shutil.rmtree(partial_dir, ignore_errors=True)
        raise


def check_same_model(folder: str | Path, expected: ModelConfig, actual: ModelConfig) -> None:
    """Raises ValueError, with the flags that describe the model in `folder`, if it is another one.

    Also if it was trained on fewer positions than `expected` allows contexts to have.
    """
    sizes = ("vocab_size", "embed_size", "ffn_size", "layers", "heads", "kv_heads", "head_size")
    names = (*sizes, "rope_theta", "norm_eps", "tie_embeddings", "family")
    differing = (name for name in names if getattr(actual, name) != getattr(expected, name))
    flags = [f"--model.{name} {getattr(actual, name)}" for name in differing]
    if actual.rope_scaling != expected.rope_scaling:
        flags += [f"--model.rope_scaling.{name} {value}" for name, value in vars(actual.rope_scaling).items()]
    if actual.max_positions < expected.max_positions:
        flags.append(f"--model.max_positions {actual.max_positions}")
    if flags:
        raise ValueError(
            f"{folder} does not hold the model of this run: set {' '.join(flags)}, choose its preset with --config, or "
            "other weights"
        )


def tensors(config: ModelConfig) -> list[Tensor]:
    """Every tensor of this model, layer after layer."""
    specs = {param_path(path): spec for path, spec in jax.tree.leaves_with_path(qwen.param_specs(config))}

    def tensor(path: str, layer: int | None = None) -> Tensor:
        whole = _tensor_slices(specs[path], [range(size) for size in specs[path].shape])
        shape = tuple(part.stop for part in whole)
        return Tensor(NAMES[path].format(layer), path, layer, shape, math.prod(shape) * specs[path].dtype.itemsize)

    stacked = [path for path in NAMES if path.startswith("layers.") and path in specs]
    layers = [tensor(path, layer) for layer in range(config.layers) for path in stacked]
    last = ["final_norm"] if config.tie_embeddings else ["final_norm", "unembed"]
    return [tensor("embed"), *layers, *map(tensor, last)]


def read_shard(files: Files, path: str, spec: ParamSpec, index: tuple[slice, ...] | None) -> np.ndarray:
    """The slice `index` of a weight, in its type; no other bytes are read. None: all of it."""
    index = index or (slice(None),) * len(spec.shape)
    ranges = [range(*part.indices(size)) for part, size in zip(index, spec.shape, strict=True)]
    shard = np.empty([len(part) for part in ranges], spec.dtype)
    slices = _tensor_slices(spec, ranges)
    is_stacked = spec.axes[0] == "layers"
    layer_shards = shard if is_stacked else shard[None]
    layers = ranges[0] if is_stacked else range(1)
    for layer_shard, layer in zip(layer_shards, layers, strict=True):
        name = NAMES[path].format(layer)
        layer_shard[...] = files[name].get_slice(name)[slices].reshape(layer_shard.shape)
    return shard


def _tensor_slices(spec: ParamSpec, ranges: list[range]) -> tuple[slice, ...]:
    """Ranges of a weight -> slices of its tensors, where heads and head size are one dimension, and layers none."""
    slices: list[slice] = []
    for axis, part, size in zip(spec.axes, ranges, spec.shape, strict=True):
        if axis == "head":  # never sharded, so `part` is a whole head
            heads = slices.pop()
            slices.append(slice(heads.start * size, heads.stop * size))
        elif axis != "layers":
            slices.append(slice(part.start, part.stop))
    return tuple(slices)


def _check_files(directory: Path, config: ModelConfig, files: Files) -> None:
    shapes = {tensor.name: tensor.shape for tensor in tensors(config)}
    check_tensors(directory, files, shapes)
    # Old Llama files hold the rotary frequencies, which follow from the config; transformers ignores them, too.
    unexpected = {name for name in files.keys() - shapes.keys() if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings and NAMES["unembed"] in unexpected:
        # Some trainers save the tied output layer, which is harmless while it equals the embedding.
        check_tensors(directory, files, {NAMES["unembed"]: shapes[NAMES["embed"]]})
        embed = files[NAMES["embed"]].get_tensor(NAMES["embed"])
        unembed = files[NAMES["unembed"]].get_tensor(NAMES["unembed"])
        if not np.array_equal(embed, unembed):
            raise ValueError(
                f"{directory}: lm_head.weight differs from the embedding that config.json ties it to; "
                "if it was trained separately, set tie_word_embeddings to false there"
            )
        unexpected -= {NAMES["unembed"]}
    if unexpected:
        raise ValueError(
            f"{directory} holds {min(unexpected)}, which this model does not have ({len(unexpected)} such tensors)"
        )


def _check_params(config: ModelConfig, weights: dict[str, Any]) -> str:
    """The one type of all weights. Raises ValueError if they do not match the config or are not all on this host."""
    expected = {param_path(path): spec.shape for path, spec in jax.tree.leaves_with_path(qwen.param_specs(config))}
    for path in sorted(expected.keys() | weights.keys()):
        shape = tuple(weights[path].shape) if path in weights else None
        if shape != expected.get(path):
            raise ValueError(f"not the weights of this config: {path} has shape {shape}, not {expected.get(path)}")
        if isinstance(weights[path], jax.Array) and not weights[path].is_fully_addressable:
            raise ValueError(f"{path} is sharded over several hosts: save a checkpoint and export that on one host")
    dtypes = sorted({weight.dtype.name for weight in weights.values()})
    if dtypes not in (["float32"], ["bfloat16"]):
        raise ValueError(f"weights of type {' and '.join(dtypes)} cannot be saved: cast all to float32 or bfloat16")
    return dtypes[0]


def _write_tensors(directory: Path, config: ModelConfig, read: ReadWeight, max_shard_bytes: int) -> None:
    from huggingface_hub import split_state_dict_into_shards_factory

    by_name = {tensor.name: tensor for tensor in tensors(config)}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        shard = [by_name[name] for name in names]
        values = (read(tensor.path, tensor.layer) for tensor in shard)
        write_file(directory / file, [(tensor.name, tensor.shape) for tensor in shard], config.param_dtype, values)
    if split.is_sharded:
        write_json(directory / INDEX_FILE, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


def _write_tokenizer(directory: Path, tokenizer: Any) -> None:
    if isinstance(tokenizer, str | Path):
        for file in (Path(tokenizer) / name for name in TOKENIZER_FILES):
            if file.is_file():
                shutil.copyfile(file, directory / file.name)
    elif tokenizer is not None:
        tokenizer.save_pretrained(str(directory))
