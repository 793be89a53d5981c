"""LoRA (Hu et al. 2021, arXiv 2106.09685): low-rank adapters of projections, as a transformation of the weights.

A projection W [out, in] becomes W + alpha / rank * B A, with B [out, rank] and A [rank, in]. The adapters are a tree of
their own, {"layers": {"wq": {"a": ..., "b": ...}, ...}}, and `merge` returns the tree of `qwen.init`: nothing that runs
the model knows of adapters. Files are those of PEFT.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
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

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PROJECTIONS = {path: name for path, name in NAMES.items() if name.endswith("proj.weight")}
PATHS = {name.split(".")[-2]: path.removeprefix("layers.") for path, name in PROJECTIONS.items()}
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
    "layer_replication": (None, []),
    "layers_to_transform": (None, []),
    "lora_bias": (False, None),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
"""Settings of adapter_config.json -> the values that `read_adapters` accepts, by default the first."""
READ = {"r", "lora_alpha", "use_rslora"}
IMPLIED_BY_NAMES = {"target_modules", "exclude_modules", "layers_pattern"}
"""Settings that follow from the names of the tensors."""
HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "lora_dropout",
    "lora_ga_config",
    "loftq_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
"""Settings that only training uses, or nothing."""


@dataclass(frozen=True)
class AdapterTensor:
    """One tensor of an adapter file: A or B of one projection in one layer."""

    name: str  # PEFT's
    shape: tuple[int, int]
    projection: str  # its name under "layers"
    part: str  # "a" or "b"
    layer: int

    def of(self, adapters: Params) -> Any:
        """Its array, in the tree of the adapters."""
        return adapters["layers"][self.projection][self.part][self.layer]


def adapter_specs(config: ModelConfig) -> Params:
    """The tree of the adapters with a `ParamSpec` in place of each array, sharded like their projection."""
    layers = qwen.param_specs(config)["layers"]
    paths = [PATHS[name] for name in config.lora_targets]
    return {"layers": {path: _pair_specs(layers[path], config.lora_rank) for path in paths}}


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
        # B is [layer, *outputs, rank] and A is [layer, rank, *inputs]; a projection has one or two of each.
        outputs = "opq"[: pair["b"].ndim - 2]
        inputs = "ijk"[: pair["a"].ndim - 2]
        subscripts = f"l{outputs}r,lr{inputs}->l{outputs}{inputs}"
        product = jnp.einsum(subscripts, pair["b"], pair["a"], precision=jax.lax.Precision.HIGHEST)
        return (weight + scale * product).astype(weight.dtype)

    layers = base["layers"]
    merged = {name: add(layers[name], pair) for name, pair in adapters["layers"].items()}
    return base | {"layers": layers | merged}


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
    if unknown := sorted(settings.keys() - SUPPORTED.keys() - READ - IMPLIED_BY_NAMES - HARMLESS):
        raise ValueError(f"{path}: {unknown[0]} is not known: remove it there if the adapters do not depend on it")
    rank = settings.get("r")
    alpha = settings.get("lora_alpha")
    are_numbers = isinstance(rank, int) and isinstance(alpha, int | float)
    if not are_numbers or not (rank > 0 and 0 < alpha < math.inf):
        raise ValueError(f"{path}: r is {rank!r} and lora_alpha is {alpha!r}, expected positive numbers")
    if settings.get("use_rslora"):
        alpha *= math.sqrt(rank)
    with open_file(directory / WEIGHTS_FILE) as file:
        names = set(file.keys())
        if not names:
            raise ValueError(f"{directory / WEIGHTS_FILE} holds no adapters: copy it again")
        targets = tuple(target for target in LORA_TARGETS if any(f".{target}." in name for name in names))
        config = replace(config, lora_rank=rank, lora_alpha=float(alpha), lora_targets=targets)
        tensors = list(_tensors(config))
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        check_tensors(directory, dict.fromkeys(names, file), shapes)
        if unexpected := names - shapes.keys():
            raise ValueError(f"{directory} holds {min(unexpected)}, which is no adapter of this model")
        adapters = jax.tree.map(lambda spec: np.empty(spec.shape, np.float32), adapter_specs(config))
        for tensor in tensors:
            target = tensor.of(adapters)
            stored = finite(directory, tensor.name, file.get_tensor(tensor.name))
            target[...] = stored.reshape(target.shape)
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
    values = (np.asarray(tensor.of(adapters)) for tensor in tensors)
    write_file(directory / WEIGHTS_FILE, [(tensor.name, tensor.shape) for tensor in tensors], dtype, values)


def _pair_specs(weight: ParamSpec, rank: int) -> dict[str, ParamSpec]:
    a_axes, b_axes = projections.adapter_axes(weight.axes[1:])
    dtype = jnp.dtype("float32")
    sizes = dict(zip(weight.axes, weight.shape, strict=True)) | {"rank": rank}

    def spec(axes: tuple[str, ...]) -> ParamSpec:
        of_all_layers = (weight.axes[0], *axes)
        return ParamSpec(tuple(sizes[axis] for axis in of_all_layers), dtype, of_all_layers)

    return {"a": spec(a_axes), "b": spec(b_axes)}


def _tensors(config: ModelConfig) -> Iterator[AdapterTensor]:
    rank = config.lora_rank
    for projection, pair in adapter_specs(config)["layers"].items():
        for part, spec in pair.items():
            size = math.prod(spec.shape[1:]) // rank
            shape = (rank, size) if part == "a" else (size, rank)
            for layer in range(config.layers):
                prefix = NAMES[f"layers.{projection}"].format(layer).removesuffix("weight")
                name = f"base_model.model.{prefix}lora_{part.upper()}.weight"
                yield AdapterTensor(name, shape, projection, part, layer)
