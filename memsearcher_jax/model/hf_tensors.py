"""The tensors of a Hugging Face Qwen2 or Qwen3 folder: names and shapes, and finding and checking them on disk."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from memsearcher_jax.model import qwen
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.hf_config import inside, read_json
from memsearcher_jax.model.qwen import Weight

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
FLOAT_TYPES = ("F32", "BF16", "F16")
WRITTEN = {"float32": "F32", "bfloat16": "BF16"}

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
"""Path of our weight -> name of their tensor; {} is the number of the layer. A model has those of its family."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of the files: a whole weight of ours, or one layer of a stacked one."""

    name: str
    path: str  # of our weight
    layer: int | None
    shape: tuple[int, ...]  # in the file
    nbytes: int  # in the type of the config


def dotted(path: tuple) -> str:
    """A tree path of JAX as the keys of `NAMES` are written."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def tensors(config: ModelConfig) -> list[Tensor]:
    """Every tensor of this model, layer after layer."""
    weights = {dotted(path): weight for path, weight in jax.tree.leaves_with_path(qwen.declared(config))}

    def tensor(path: str, layer: int | None = None) -> Tensor:
        shape = _file_shape(weights[path])
        nbytes = math.prod(shape) * weights[path].dtype.itemsize
        return Tensor(NAMES[path].format(layer), path, layer, shape, nbytes)

    stacked = [path for path in NAMES if path.startswith("layers.") and path in weights]
    layers = [tensor(path, layer) for layer in range(config.layers) for path in stacked]
    last = ["final_norm"] if config.tied else ["final_norm", "unembed"]
    return [tensor("embed"), *layers, *map(tensor, last)]


def open_files(directory: Path, stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> the open file that holds it; `stack` closes them.

    Of a single file and an index the file wins, as it does in transformers.
    Raises FileNotFoundError for what is missing and ValueError for what is damaged.
    """
    if (directory / SINGLE_FILE).is_file():
        handle = _open(directory / SINGLE_FILE, stack)
        return dict.fromkeys(handle.keys(), handle)
    index = directory / INDEX_FILE
    if not index.is_file():
        raise FileNotFoundError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; other formats are not read")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index} has no weight_map: copy it again")
    handles = {}
    for file in sorted(set(weight_map.values())):
        path = inside(directory, file, said_by=index)
        if not path.is_file():
            raise FileNotFoundError(f"{index} names {file}, which is missing: copy the folder again")
        handles[file] = _open(path, stack)
    held = {file: set(handle.keys()) for file, handle in handles.items()}
    for name, file in weight_map.items():
        if name not in held[file]:
            raise ValueError(f"{index} places {name} in {file}, which does not hold it: copy the folder again")
    return {name: handles[file] for name, file in weight_map.items()}


def check(directory: Path, config: ModelConfig, files: Mapping[str, Any]) -> None:
    """Raises ValueError unless the files hold this model's tensors and no others, in shapes and types that we read."""
    expected = {tensor.name: tensor for tensor in tensors(config)}
    if missing := sorted(expected.keys() - files.keys()):
        raise ValueError(f"{directory} lacks the tensor {missing[0]} ({len(missing)} missing in all)")
    unexpected = files.keys() - expected.keys()
    if config.tied and NAMES["unembed"] in unexpected:
        _check_tied_copy(directory, files)
        unexpected -= {NAMES["unembed"]}
    if unexpected:
        raise ValueError(
            f"{directory} holds {min(unexpected)}, which this model has not ({len(unexpected)} such tensors)"
        )
    for name, tensor in expected.items():
        found = files[name].get_slice(name)
        if tuple(found.get_shape()) != tensor.shape:
            raise ValueError(
                f"{directory}: {name} is {found.get_shape()}, but config.json asks for {list(tensor.shape)}"
            )
        if found.get_dtype() not in FLOAT_TYPES:
            raise ValueError(f"{directory}: {name} is {found.get_dtype()}, expected one of {', '.join(FLOAT_TYPES)}")


def read(files: Mapping[str, Any], path: str, weight: Weight, index: tuple[slice, ...]) -> np.ndarray:
    """The part `index` of one of our weights, in its type; no other bytes are read."""
    spans = [range(*part.indices(size)) for part, size in zip(index, weight.shape, strict=True)]
    block = np.empty([len(span) for span in spans], weight.dtype)
    stacked = weight.axes[0] == "layers"
    cuts = _file_cuts(weight, spans)
    for row, layer in zip(block if stacked else block[None], spans[0] if stacked else range(1), strict=True):
        name = NAMES[path].format(layer)
        row[...] = files[name].get_slice(name)[cuts].reshape(row.shape)
    return block


def write_file(
    file: Path, tensors: Sequence[Tensor], dtype: str, fetch: Callable[[str, int | None], np.ndarray]
) -> None:
    """Writes one safetensors file, a tensor at a time; the library's writer wants all of them in memory, twice.

    Format: github.com/huggingface/safetensors, "Format": the length of the header in 8 bytes, the header, the bytes.
    """
    sizes = [math.prod(tensor.shape) * jnp.dtype(dtype).itemsize for tensor in tensors]
    ends = list(itertools.accumulate(sizes))
    header = {"__metadata__": {"format": "pt"}} | {
        tensor.name: {"dtype": WRITTEN[dtype], "shape": tensor.shape, "data_offsets": [end - size, end]}
        for tensor, size, end in zip(tensors, sizes, ends, strict=True)
    }
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    with open(file, "wb") as out:
        out.write(len(told).to_bytes(8, "little") + told)
        for tensor, size in zip(tensors, sizes, strict=True):
            value = np.ascontiguousarray(fetch(tensor.path, tensor.layer).astype(dtype, copy=False))
            if value.nbytes != size:
                raise ValueError(
                    f"{tensor.path} has {value.size} entries, {tensor.name} wants {math.prod(tensor.shape)}"
                )
            out.write(value.reshape(-1).view(np.uint8).data)
        out.flush()
        os.fsync(out.fileno())


def _file_shape(weight: Weight) -> tuple[int, ...]:
    return tuple(cut.stop for cut in _file_cuts(weight, [range(size) for size in weight.shape]))


def _file_cuts(weight: Weight, spans: list[range]) -> tuple[slice, ...]:
    """Spans of our weight -> slices of their tensor, where heads and head size are one dimension, layers none."""
    cuts: list[slice] = []
    for axis, span, size in zip(weight.axes, spans, weight.shape, strict=True):
        if axis == "head":  # never split over devices, so `span` is a whole head
            heads = cuts.pop()
            cuts.append(slice(heads.start * size, heads.stop * size))
        elif axis != "layers":
            cuts.append(slice(span.start, span.stop))
    return tuple(cuts)


def _open(path: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="numpy"))
    except SafetensorError as error:
        raise ValueError(f"{path} is cut off or no safetensors file ({error}): copy it again") from error


def _check_tied_copy(directory: Path, files: Mapping[str, Any]) -> None:
    """Some trainers write the tied output layer out; that is harmless only while it equals the embedding."""
    embed, unembed = (files[NAMES[path]].get_tensor(NAMES[path]) for path in ("embed", "unembed"))
    if not np.array_equal(embed, unembed):
        raise ValueError(
            f"{directory}: lm_head.weight differs from the embedding that config.json ties it to; "
            "if it was trained apart, set tie_word_embeddings to false there"
        )
