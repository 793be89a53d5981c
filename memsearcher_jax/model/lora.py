"""LoRA (Hu et al. 2021, arXiv 2106.09685): low-rank adapters of projections, as a transformation of the weights.

A projection W [out, in] becomes W + alpha / rank * B A, with B [out, rank] and A [rank, in]. The adapters are a tree of
their own, {"layers": {"wq": {"a": ..., "b": ...}, ...}}, and `merge` returns the tree of `qwen.init`: nothing that runs
the model knows of adapters. Files are those of PEFT.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memsearcher_jax.model import projections, qwen
from memsearcher_jax.model.config import LORA_TARGETS, ModelConfig
from memsearcher_jax.model.hf_config import read_json, write_json
from memsearcher_jax.model.qwen import Params, ParamSpec
from memsearcher_jax.model.safetensors_files import check_tensors, finite, open_file, write_file
from memsearcher_jax.model.weights import NAMES

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
PATHS = {name.split(".")[-2]: path.removeprefix("layers.") for path, name in NAMES.items() if "proj.weight" in name}
"""PEFT's name of a projection, such as q_proj -> its name under "layers"."""
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),  # the others change the weights
    "alora_invocation_tokens": (None, []),
    "bias": ("none",),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    **dict.fromkeys(("layer_replication", "layers_to_transform"), (None, [])),
    "lora_bias": (False, None),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    **dict.fromkeys(("use_qalora", "use_bdlora"), (False, None)),
    **dict.fromkeys(("arrow_config", "kasa_config", "monteclora_config", "velora_config"), (None,)),
}
"""Settings of adapter_config.json -> the values that `read_adapters` accepts, by default the first."""
READ_OR_HARMLESS = {
    *("r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "layers_pattern"),
    *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "inference_mode"),
    *("lora_dropout", "lora_ga_config", "loftq_config", "megatron_config", "megatron_core", "peft_version"),
    *("qalora_group_size", "revision", "runtime_config", "task_type"),
}
"""The other settings: those that are read, that the names of the tensors tell, or that only training uses."""


def adapter_specs(config: ModelConfig) -> Params:
    """The tree of the adapters with a `ParamSpec` in place of each array, sharded like their projection."""
    layers = qwen.param_specs(config)["layers"]
    return {"layers": {PATHS[name]: _pair_specs(layers[PATHS[name]], config.lora_rank) for name in config.lora_targets}}


def trainable_specs(config: ModelConfig) -> Params:
    """The specs of what training changes: the adapters, or all weights if `lora_rank` is 0."""
    return adapter_specs(config) if config.lora_rank else qwen.param_specs(config)


def init(key: jax.Array, config: ModelConfig) -> Params:
    """New adapters, which change nothing: A is uniform in +-1 / sqrt(in), as in PEFT, and B is 0."""

    def draw(path: tuple, spec: ParamSpec) -> jax.Array:
        if path[-1].key == "b":
            return jnp.zeros(spec.shape, spec.dtype)
        bound = math.prod(spec.shape[2:]) ** -0.5
        number = list(PATHS.values()).index(path[-2].key)
        return jax.random.uniform(jax.random.fold_in(key, number), spec.shape, spec.dtype, -bound, bound)

    return jax.tree.map_with_path(draw, adapter_specs(config))


def merge(base: Params, adapters: Params, config: ModelConfig) -> Params:
    """The weights with the adapters added, in the type of `base`: summed in float32, rounded once.

    Differentiable with respect to the adapters. Under `shard_map_by_rows` both are shards, and so is the result.
    """
    scale = config.lora_alpha / config.lora_rank

    def add(weight: jax.Array, pair: Params) -> jax.Array:
        out, into = "opq"[: pair["b"].ndim - 2], "ijk"[: pair["a"].ndim - 2]
        product = jnp.einsum(
            f"l{out}r,lr{into}->l{out}{into}", pair["b"], pair["a"], precision=jax.lax.Precision.HIGHEST
        )
        return (weight + scale * product).astype(weight.dtype)

    layers = base["layers"]
    return base | {"layers": layers | {name: add(layers[name], pair) for name, pair in adapters["layers"].items()}}


def read_adapters(directory: str | Path, config: ModelConfig) -> tuple[ModelConfig, Params]:
    """(config with the rank, alpha and targets of the files, adapters as float32 arrays) of a PEFT folder.

    Raises FileNotFoundError or ValueError for an incomplete folder, another model, and variants of LoRA.
    """
    directory = Path(directory)
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory} holds no adapters (no {CONFIG_FILE}): launch/export_hf.py --adapter writes those of a run"
        )
    settings = read_json(path)
    for name, accepted in SUPPORTED.items():
        if settings.get(name, accepted[0]) not in accepted:
            raise ValueError(f"{path}: {name} is {settings[name]!r}, only {accepted[0]!r} is supported")
    if unknown := sorted(settings.keys() - SUPPORTED.keys() - READ_OR_HARMLESS):
        raise ValueError(f"{path}: {unknown[0]} is not known: remove it there if the adapters do not depend on it")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or not (rank > 0 and 0 < alpha < math.inf):
        raise ValueError(f"{path}: r is {rank!r} and lora_alpha is {alpha!r}, expected positive numbers")
    alpha = float(alpha * math.sqrt(rank) if settings.get("use_rslora") else alpha)
    with open_file(directory / WEIGHTS_FILE) as file:
        names = set(file.keys())
        if not names:
            raise ValueError(f"{directory / WEIGHTS_FILE} holds no adapters: copy it again")
        targets = tuple(target for target in LORA_TARGETS if any(f".{target}." in name for name in names))
        config = replace(config, lora_rank=rank, lora_alpha=alpha, lora_targets=targets)
        tensors = list(_tensors(config))
        check_tensors(directory, dict.fromkeys(names, file), {name: shape for name, shape, *_ in tensors})
        if unexpected := names - {name for name, *_ in tensors}:
            raise ValueError(f"{directory} holds {min(unexpected)}, which is no adapter of this model")
        adapters = jax.tree.map(lambda spec: np.empty(spec.shape, np.float32), adapter_specs(config))
        for name, _, param, part, layer in tensors:
            target = adapters["layers"][param][part][layer]
            target[...] = finite(directory, name, file.get_tensor(name)).reshape(target.shape)
    return config, adapters


def write_adapters(
    directory: Path, config: ModelConfig, adapters: Params, base: str, dtype: str, revision: str = ""
) -> None:
    """Writes adapters, as arrays on this host, so that PEFT loads them onto `revision` of the model in `base`."""
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision or None,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "target_modules": list(config.lora_targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    write_json(directory / CONFIG_FILE, settings)
    tensors = list(_tensors(config))
    values = (np.asarray(adapters["layers"][param][part][layer]) for _, _, param, part, layer in tensors)
    write_file(directory / WEIGHTS_FILE, [(name, shape) for name, shape, *_ in tensors], dtype, values)


def _pair_specs(weight: ParamSpec, rank: int) -> dict[str, ParamSpec]:
    (a_axes, b_axes), dtype = projections.adapter_axes(weight.axes[1:]), jnp.dtype("float32")
    sizes = dict(zip(weight.axes, weight.shape, strict=True)) | {"rank": rank}
    pair = {"a": (weight.axes[0], *a_axes), "b": (weight.axes[0], *b_axes)}
    return {name: ParamSpec(tuple(sizes[axis] for axis in axes), dtype, axes) for name, axes in pair.items()}


def _tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int], str, str, int]]:
    """(PEFT's name, its shape, name under "layers", "a" or "b", layer) of every tensor of the adapters."""
    for param, pair in adapter_specs(config)["layers"].items():
        for part, spec in pair.items():
            rank = config.lora_rank
            size = math.prod(spec.shape[1:]) // rank
            for layer in range(config.layers):
                name = NAMES[f"layers.{param}"].format(layer).removesuffix("weight")
                shape = (rank, size) if part == "a" else (size, rank)
                yield f"base_model.model.{name}lora_{part.upper()}.weight", shape, param, part, layer
