"""Weights of a text encoder from a Hugging Face folder: safetensors only, one tensor on the host at a time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np

from memsearcher_jax.model import encoder, hf_tensors
from memsearcher_jax.model.encoder_config import EncoderConfig, read_encoder_config
from memsearcher_jax.model.hf_tensors import FLOAT_TYPES, dotted

NAMES = {
    "word": "embeddings.word_embeddings.weight",
    "position": "embeddings.position_embeddings.weight",
    "type": "embeddings.token_type_embeddings.weight",
    "embed_scale": "embeddings.LayerNorm.weight",
    "embed_shift": "embeddings.LayerNorm.bias",
    "layers.wq": "encoder.layer.{}.attention.self.query.weight",
    "layers.bq": "encoder.layer.{}.attention.self.query.bias",
    "layers.wk": "encoder.layer.{}.attention.self.key.weight",
    "layers.bk": "encoder.layer.{}.attention.self.key.bias",
    "layers.wv": "encoder.layer.{}.attention.self.value.weight",
    "layers.bv": "encoder.layer.{}.attention.self.value.bias",
    "layers.wo": "encoder.layer.{}.attention.output.dense.weight",
    "layers.bo": "encoder.layer.{}.attention.output.dense.bias",
    "layers.attention_scale": "encoder.layer.{}.attention.output.LayerNorm.weight",
    "layers.attention_shift": "encoder.layer.{}.attention.output.LayerNorm.bias",
    "layers.up": "encoder.layer.{}.intermediate.dense.weight",
    "layers.up_bias": "encoder.layer.{}.intermediate.dense.bias",
    "layers.down": "encoder.layer.{}.output.dense.weight",
    "layers.down_bias": "encoder.layer.{}.output.dense.bias",
    "layers.ffn_scale": "encoder.layer.{}.output.LayerNorm.weight",
    "layers.ffn_shift": "encoder.layer.{}.output.LayerNorm.bias",
}
"""Path of our weight -> name of their tensor; {} is the number of the layer. Heads and head size are one dimension."""

PREFIXES = ("", "bert.", "roberta.")
"""What stands in front of every name where the encoder was saved as a part of a larger model."""


def load(directory: str | Path) -> tuple[EncoderConfig, dict]:
    """(config, params): float32 numpy arrays in the tree of `encoder.init`, for the caller to place on devices.

    Tensors beside the encoder's own, such as a pooler or a head, are left unread.
    Raises FileNotFoundError or ValueError, in one line, for a folder that is not whole or not of this family.
    """
    directory = Path(directory)
    config = read_encoder_config(directory)
    with ExitStack() as stack:
        files = hf_tensors.open_files(directory, stack)
        prefix = next((prefix for prefix in PREFIXES if prefix + NAMES["word"] in files), None)
        if prefix is None:
            raise ValueError(f"{directory} lacks the tensor {NAMES['word']}: it holds no encoder of the BERT family")
        return config, jax.tree.map_with_path(
            lambda path, weight: _read(directory, files, prefix + NAMES[dotted(path)], weight.shape, dotted(path)),
            encoder.declared(config),
        )


def _read(directory: Path, files: Mapping[str, Any], name: str, shape: tuple[int, ...], path: str) -> np.ndarray:
    if not path.startswith("layers."):
        return _tensor(directory, files, name, shape)
    in_file = _file_shape(path, shape[1:])
    layers = [_tensor(directory, files, name.format(layer), in_file) for layer in range(shape[0])]
    return np.stack(layers).reshape(shape)


def _file_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of one layer's tensor in the file, where heads and head size are one dimension."""
    leaf = path.rpartition(".")[2]
    if leaf in ("wq", "wk", "wv", "bq", "bk", "bv"):
        return (shape[0] * shape[1], *shape[2:])
    return (shape[0], shape[1] * shape[2]) if leaf == "wo" else shape


def _tensor(directory: Path, files: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name not in files:
        raise ValueError(f"{directory} lacks the tensor {name}: copy the folder again")
    found = files[name].get_slice(name)
    if tuple(found.get_shape()) != shape:
        raise ValueError(f"{directory}: {name} is {found.get_shape()}, but config.json asks for {list(shape)}")
    if found.get_dtype() not in FLOAT_TYPES:
        raise ValueError(f"{directory}: {name} is {found.get_dtype()}, expected one of {', '.join(FLOAT_TYPES)}")
    return files[name].get_tensor(name).astype(np.float32)
