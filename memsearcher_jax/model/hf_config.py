"""Hugging Face's config.json of a Qwen2 or Qwen3, both ways. What we cannot do is refused by name, never ignored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memsearcher_jax.model.config import ModelConfig

SIZES = {
    "vocab_size": "vocab_size",
    "embed_size": "hidden_size",
    "ffn_size": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
}
"""Our field -> theirs, for those that every config.json must state."""

UNSUPPORTED_UNLESS = {
    "hidden_act": ("silu", None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
}
"""Settings of theirs that change the numbers, and the only values that this model computes."""

QWEN3_UNLESS = {"attention_bias": (False, None)}
"""The same of Qwen3 alone."""

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""By family, which is the model_type of theirs."""

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
)
"""All that a tokenizer's folder may hold, so that a copy of it is whole."""


def read_config(directory: str | Path) -> ModelConfig:
    """The model that a Hugging Face folder describes; `param_dtype` is the type that its weights are declared in.

    Float16 is declared float32, which holds it exactly. Settings that a folder does not decide keep their defaults.
    Raises FileNotFoundError without folder or config.json, ValueError for anything but what we implement of Qwen2 and
    Qwen3.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"no folder {directory}: expected a Hugging Face model")
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no config.json: it is not a Hugging Face model folder")
    theirs = read_json(path)
    family = theirs.get("model_type")
    if family not in ARCHITECTURES:
        raise ValueError(f"{path}: model_type is {family!r}, expected 'qwen2' or 'qwen3'")
    for name, values in (UNSUPPORTED_UNLESS | (QWEN3_UNLESS if family == "qwen3" else {})).items():
        if theirs.get(name) not in values:
            raise ValueError(f"{path}: {name} = {theirs[name]!r} is not supported, only {values[0]!r} is")
    if sliding := {kind for kind in theirs.get("layer_types") or () if kind != "full_attention"}:
        raise ValueError(f"{path}: layer_types has {min(sliding)!r}, only 'full_attention' is supported")

    sizes = {ours: _size(path, theirs, name) for ours, name in SIZES.items()}
    if theirs.get("num_key_value_heads") is None:
        theirs["num_key_value_heads"] = sizes["heads"]
    if theirs.get("head_dim") is None and family == "qwen2":  # a qwen3 always states it
        theirs["head_dim"] = sizes["embed_size"] // sizes["heads"]
    kv_heads, head_size = _size(path, theirs, "num_key_value_heads"), _size(path, theirs, "head_dim")
    if sizes["heads"] % kv_heads:
        raise ValueError(
            f"{path}: num_attention_heads {sizes['heads']} is no multiple of num_key_value_heads {kv_heads}"
        )
    if head_size % 2:
        raise ValueError(f"{path}: head_dim {head_size} is odd, but rotary positions need pairs")
    return ModelConfig(
        **sizes,
        kv_heads=kv_heads,
        head_size=head_size,
        rope_theta=_rope_theta(path, theirs),
        norm_eps=_positive(path, "rms_norm_eps", theirs.get("rms_norm_eps", 1e-6)),
        tied=bool(theirs.get("tie_word_embeddings", False)),
        family=family,
        max_positions=_size(path, theirs, "max_position_embeddings"),
        param_dtype="bfloat16" if theirs.get("dtype", theirs.get("torch_dtype")) == "bfloat16" else "float32",
    )


def config_json(config: ModelConfig, end_ids: Sequence[int] = ()) -> dict[str, Any]:
    """What to write as config.json; older and newer transformers each find the fields that they look for."""
    ends = {"eos_token_id": end_ids[0]} if end_ids else {}
    return ends | {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tied,
        "use_sliding_window": False,
        **({"attention_bias": False} if config.family == "qwen3" else {}),
        "dtype": config.param_dtype,
        "torch_dtype": config.param_dtype,
    }


def generation_json(end_ids: Sequence[int]) -> dict[str, Any]:
    """What to write as generation_config.json: any of `end_ids` ends a generation, and the last one pads a batch."""
    return {"eos_token_id": list(end_ids), "pad_token_id": end_ids[-1]}


def inside(directory: Path, name: str, *, said_by: Path) -> Path:
    """What is called `name` in the folder. Raises ValueError for a name that leads out of it: files name files."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{said_by} names {name!r}, which is not in its folder: do not trust these files")
    return directory / name


def read_json(path: Path, kind: type = dict) -> Any:
    """The JSON object in a file, or with `kind` list the array; ValueError in one line if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, kind):
        wanted = "array" if kind is list else "object"
        raise ValueError(f"{path} holds a {type(value).__name__}, expected a JSON {wanted}")
    return value


def _size(path: Path, theirs: dict[str, Any], name: str) -> int:
    value = theirs.get(name)
    if type(value) is not int or value < 1:
        raise ValueError(f"{path}: {name} is {value!r}, expected a positive whole number")
    return value


def _rope_theta(path: Path, theirs: dict[str, Any]) -> float:
    """The base of the rotary angles: transformers 5 writes it inside rope_parameters, before that it stood outside."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = theirs.get(name) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or rope.get("partial_rotary_factor", 1) != 1:
            raise ValueError(f"{path}: {name} = {json.dumps(rope)} is not supported, only the default rotation is")
    rope = theirs.get("rope_parameters") or {}
    return _positive(path, "rope_theta", rope.get("rope_theta", theirs.get("rope_theta")))


def _positive(path: Path, name: str, value: Any) -> float:
    if not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"{path}: {name} is {value!r}, expected a positive number")
    return float(value)
