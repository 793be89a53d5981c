"""Reading and writing the safetensors files of Hugging Face folders, one tensor at a time."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from memsearcher_jax.model.hf_config import read_json, resolve_inside

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
READABLE_TYPES = ("F32", "BF16", "F16")
TYPE_NAMES = {"float32": "F32", "bfloat16": "BF16"}

Files = Mapping[str, Any]
"""Tensor name -> the open safetensors file that holds it."""


def open_files(directory: Path, stack: ExitStack) -> Files:
    """The open files of a folder, by tensor name; `stack` closes them.

    A single file takes precedence over an index, as in transformers.
    Raises FileNotFoundError for missing files and ValueError for damaged ones.
    """
    if (directory / SINGLE_FILE).is_file():
        file = stack.enter_context(open_file(directory / SINGLE_FILE))
        return dict.fromkeys(file.keys(), file)
    index = directory / INDEX_FILE
    if not index.is_file():
        raise FileNotFoundError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; other formats are not read")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index} has no weight_map: copy it again")
    files = {}
    for name in sorted(set(weight_map.values())):
        path = resolve_inside(directory, name, named_by=index)
        if not path.is_file():
            raise FileNotFoundError(f"{index} names {name}, which is missing: copy the folder again")
        files[name] = stack.enter_context(open_file(path))
    tensors = {name: set(file.keys()) for name, file in files.items()}
    for tensor, name in weight_map.items():
        if tensor not in tensors[name]:
            raise ValueError(f"{index} places {tensor} in {name}, which does not hold it: copy the folder again")
    return {tensor: files[name] for tensor, name in weight_map.items()}


def check_tensors(directory: Path, files: Files, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError unless the files hold these tensors, in these shapes and a readable type. Reads headers."""
    if missing := sorted(shapes.keys() - files.keys()):
        raise ValueError(f"{directory} lacks the tensor {missing[0]} ({len(missing)} missing in all)")
    for name, shape in shapes.items():
        tensor = files[name].get_slice(name)
        if tuple(tensor.get_shape()) != shape:
            raise ValueError(f"{directory}: {name} is {tensor.get_shape()}, but config.json implies {list(shape)}")
        if tensor.get_dtype() not in READABLE_TYPES:
            raise ValueError(
                f"{directory}: {name} is {tensor.get_dtype()}, expected one of {', '.join(READABLE_TYPES)}"
            )


def finite(directory: Path, name: str, value: np.ndarray) -> np.ndarray:
    """The value of a tensor. Raises ValueError if it holds NaN or infinity."""
    if not np.isfinite(value.sum(dtype=np.float32)):  # a third of the time of looking at every number
        raise ValueError(f"{directory}: {name} holds NaN or infinite numbers: copy the folder again")
    return value


def write_file(
    path: Path, shapes: Sequence[tuple[str, tuple[int, ...]]], dtype: str, values: Iterable[np.ndarray]
) -> None:
    """Writes one file from (name, shape) of each tensor and their values, which are requested one at a time.

    The library's own writer needs all tensors of a file in memory. Format: 8 bytes with the length of the header, the
    header, the bytes (github.com/huggingface/safetensors, "Format").
    """
    sizes = [math.prod(shape) * jnp.dtype(dtype).itemsize for _, shape in shapes]
    ends = list(itertools.accumulate(sizes))
    tensors = {
        name: {"dtype": TYPE_NAMES[dtype], "shape": shape, "data_offsets": [end - size, end]}
        for (name, shape), size, end in zip(shapes, sizes, ends, strict=True)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}} | tensors).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for (name, shape), size, value in zip(shapes, sizes, values, strict=True):
            value = np.ascontiguousarray(value.astype(dtype, copy=False))
            if value.nbytes != size:
                raise ValueError(f"{name} has {value.size} entries, expected {math.prod(shape)}")
            file.write(value.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def open_file(path: Path) -> Any:
    """One file, for a with statement. Raises FileNotFoundError if it is missing, ValueError if it is damaged."""
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{path} is cut off or no safetensors file ({error}): copy it again") from error
