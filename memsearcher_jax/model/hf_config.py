"""config.json of Hugging Face folders: read for a decoder and written back.

Every key is read, or known to change nothing, or refused by name.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from memsearcher_jax.model.config import ModelConfig, RopeScaling

Settings = dict[str, Any]
"""A parsed config.json."""

SIZES = {
    "vocab_size": "vocab_size",
    "embed_size": "hidden_size",
    "ffn_size": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
}
"""Field of a config -> the key of config.json, for the sizes that decoders and encoders must both state."""

DECODER_SIZES = SIZES | {"kv_heads": "num_key_value_heads", "max_positions": "max_position_embeddings"}

OFF = (False, None)
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": OFF,
    "is_decoder": OFF,
    "is_encoder_decoder": OFF,
    "tie_encoder_decoder": OFF,
    "is_causal": (True, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}
"""Settings that change the numbers of any model -> the values that both models here implement, by default the first."""

SUPPORTED_DECODER = SUPPORTED | {
    "is_decoder": (False, True, None),
    "hidden_act": ("silu", None),
    "use_sliding_window": OFF,
    "use_mrope": OFF,
    "rope_interleaved": OFF,
}

SUPPORTED_BY_FAMILY = {
    "qwen2": {},
    "qwen3": {"attention_bias": OFF},
    "llama": {"attention_bias": OFF, "mlp_bias": OFF, "pretraining_tp": (1, None)},
}

HARMLESS = {
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "chunk_size_feed_forward",
    "_commit_hash",
    "cross_attention_hidden_size",
    "finetuning_task",
    "gradient_checkpointing",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "max_window_layers",
    "model_name",
    "_name_or_path",
    "num_labels",
    "output_attentions",
    "prefix",
    "problem_type",
    "return_dict",
    "sep_token_id",
    "sliding_window",
    "task_specific_params",
    "tf_legacy_loss",
    "tokenizer_class",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
}
"""Keys of any model that do not change its numbers, besides those of generation, such as eos_token_id."""

READ_DECODER = {
    *DECODER_SIZES.values(),
    "model_type",
    "head_dim",
    "rms_norm_eps",
    "tie_word_embeddings",
    "layer_types",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "dtype",
    "torch_dtype",
}

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
"""`ModelConfig.family`, which is the model_type of config.json -> architecture."""

SCALING = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}
"""Field of `RopeScaling` -> the key of config.json."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""Every file that a tokenizer's folder may hold, for copying it."""


def transformers() -> ModuleType:
    """The library, imported when it is first needed: it takes most of a second. Its models, on torch, are not used."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is missing
    import transformers

    return transformers


def read_config(directory: str | Path) -> ModelConfig:
    """The model that a Hugging Face folder describes; `param_dtype` is the type that config.json declares.

    Float16 becomes float32, which represents it exactly. Settings that a folder does not determine keep their defaults.
    Raises FileNotFoundError without folder or config.json, ValueError for an unsupported model.
    """
    path, settings = read_settings(directory)
    family = settings.model_type
    if family not in ARCHITECTURES:
        raise ValueError(f"{path}: model_type is {family!r}, expected one of {', '.join(ARCHITECTURES)}")
    check_settings(path, settings, SUPPORTED_DECODER | SUPPORTED_BY_FAMILY[family], READ_DECODER)
    layer_types = getattr(settings, "layer_types", None) or ()
    if other_types := set(layer_types) - {"full_attention"}:
        raise ValueError(f"{path}: layer_types has {min(other_types)!r}, only 'full_attention' is supported")
    sizes = read_sizes(path, settings, DECODER_SIZES)
    check_heads(path, sizes["heads"], sizes["kv_heads"])
    head_size = getattr(settings, "head_dim", None) or sizes["embed_size"] // sizes["heads"]
    if head_size < 2:
        raise ValueError(f"{path}: head_dim is {head_size}, expected at least 2")
    return ModelConfig(
        **sizes,
        head_size=head_size,
        **_rope(path, settings.rope_parameters, read_json(path)),
        norm_eps=settings.rms_norm_eps,
        tie_embeddings=settings.tie_word_embeddings,
        family=family,
        param_dtype="bfloat16" if str(settings.dtype).endswith("bfloat16") else "float32",
    )


def config_json(config: ModelConfig, end_ids: Sequence[int] = ()) -> Settings:
    """The content of config.json, with the keys that old and new versions of transformers read."""
    settings: Settings = {"eos_token_id": end_ids[0]} if end_ids else {}
    settings |= {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        **{key: getattr(config, field) for field, key in DECODER_SIZES.items()},
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": _rope_parameters(config) | {"rope_theta": config.rope_theta},
    }
    if config.rope_scaling.factor != 1:
        settings["rope_scaling"] = _rope_parameters(config)
    settings |= {
        "tie_word_embeddings": config.tie_embeddings,
        "use_sliding_window": False,
        **{key: values[0] for key, values in SUPPORTED_BY_FAMILY[config.family].items()},
        "dtype": config.param_dtype,
        "torch_dtype": config.param_dtype,
    }
    return settings


def read_settings(directory: str | Path) -> tuple[Path, Any]:
    """(path, config of transformers) of config.json. Raises FileNotFoundError, and ValueError in one line."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: {directory} is not a Hugging Face model folder")
    try:
        config = transformers().AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many types, some of several lines
        raise ValueError(f"{path}: {' '.join(str(error).split())[:300]}") from error
    return path, config


def read_sizes(path: Path, settings: Any, keys: Mapping[str, str]) -> dict[str, int]:
    """Field -> the value of its key. Raises ValueError for the first that is below 1."""
    sizes = {field: getattr(settings, key) for field, key in keys.items()}
    for field, key in keys.items():
        if sizes[field] < 1:
            raise ValueError(f"{path}: {key} is {sizes[field]}, expected at least 1")
    return sizes


def check_heads(path: Path, heads: int, kv_heads: int) -> None:
    """Raises ValueError unless every kv head has equally many query heads."""
    if min(heads, kv_heads) < 1 or heads % kv_heads:
        raise ValueError(f"{path}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")


def check_settings(path: Path, settings: Any, supported: Mapping[str, Sequence], read: Collection[str]) -> None:
    """Raises ValueError for the first setting with a value that is not supported, and for a key that is not known.

    `read`: the keys that the caller reads.
    """
    for key, values in supported.items():
        if (value := getattr(settings, key, values[0])) not in values:
            raise ValueError(f"{path}: {key} = {value!r} is not supported, only {values[0]!r} is")
    known = {*supported, *read, *HARMLESS, *transformers().GenerationConfig().to_dict()}
    if unknown := sorted(read_json(path).keys() - known):
        raise ValueError(
            f"{path}: {unknown[0]} is not known, and the model may depend on it: remove it there if it does not"
        )


def resolve_inside(directory: Path, name: str, *, named_by: Path) -> Path:
    """The path of `name` in the folder. Raises ValueError for a name that leads out of it."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{named_by} names {name!r}, which is not in its folder: do not trust these files")
    return directory / name


def read_json(path: Path, kind: type = dict) -> Any:
    """The JSON object in a file, or with `kind` list the array. Raises ValueError, in one line, for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, kind):
        expected = "array" if kind is list else "object"
        raise ValueError(f"{path} holds a {type(value).__name__}, expected a JSON {expected}")
    return value


def write_json(path: Path, value: Settings) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _rope(path: Path, rope: Settings, stored: Settings) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of rope_parameters, with which the older keys of the file must agree."""
    kind = rope.get("rope_type")
    scaling_keys = tuple(SCALING.values()) if kind == "llama3" else ()
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
    rotates_all = rope.get("partial_rotary_factor", 1) == 1
    if kind not in ("default", "llama3") or not rotates_all or rope.keys() - known - {*scaling_keys}:
        raise ValueError(f"{path}: rope_parameters = {json.dumps(rope)} is not supported, only default and llama3 are")
    places = ({"rope_theta": stored.get("rope_theta")}, stored.get("rope_scaling"), stored.get("rope_parameters"))
    for place in places:
        for key, value in (place or {}).items():
            other = rope.get("rope_type" if key == "type" else key)
            if value is not None and value != other:
                raise ValueError(f"{path}: {key} is {value} in one place and {other} in another: correct it")
    for key in ("rope_theta", *scaling_keys):
        if not isinstance(rope[key], int | float) or not 0 < rope[key] < math.inf:
            raise ValueError(f"{path}: {key} is {rope[key]!r}, expected a positive number")
    scaling = RopeScaling()
    if kind == "llama3":
        scaling = RopeScaling(**{field: rope[key] for field, key in SCALING.items()})
        if scaling.low_frequency_factor >= scaling.high_frequency_factor:
            low = scaling.low_frequency_factor
            high = scaling.high_frequency_factor
            raise ValueError(f"{path}: rope_parameters: low_freq_factor {low} is not below high_freq_factor {high}")
    return {"rope_theta": float(rope["rope_theta"]), "rope_scaling": scaling}


def _rope_parameters(config: ModelConfig) -> Settings:
    """The keys of config.json that describe the scaling."""
    if config.rope_scaling.factor == 1:
        return {"rope_type": "default"}
    return {"rope_type": "llama3", **{key: getattr(config.rope_scaling, name) for name, key in SCALING.items()}}
