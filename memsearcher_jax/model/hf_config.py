"""config.json of Hugging Face folders: read for a decoder and written back. Unsupported settings raise, by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
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

SUPPORTED = {
    "hidden_act": ("silu", None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
}
"""Settings that change the numbers -> the values that this model implements."""

SUPPORTED_BY_FAMILY = {
    "qwen2": {},
    "qwen3": {"attention_bias": (False, None)},
    "llama": {"attention_bias": (False, None), "mlp_bias": (False, None), "pretraining_tp": (1, None)},
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
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
)
"""Every file that a tokenizer's folder may hold, for copying it."""


def read_config(directory: str | Path) -> ModelConfig:
    """The model that a Hugging Face folder describes; `param_dtype` is the type that config.json declares.

    Float16 becomes float32, which represents it exactly. Settings that a folder does not determine keep their defaults.
    Raises FileNotFoundError without folder or config.json, ValueError for an unsupported model.
    """
    return parse_config(*read_settings(directory))


def parse_config(path: Path, settings: Settings) -> ModelConfig:
    """The model that the content of a config.json describes; `path` names it in errors. Raises as `read_config`."""
    family = settings.get("model_type")
    if family not in ARCHITECTURES:
        raise ValueError(f"{path}: model_type is {family!r}, expected one of {', '.join(ARCHITECTURES)}")
    check_supported(path, settings, SUPPORTED | SUPPORTED_BY_FAMILY[family])
    if sliding := {kind for kind in settings.get("layer_types") or () if kind != "full_attention"}:
        raise ValueError(f"{path}: layer_types has {min(sliding)!r}, only 'full_attention' is supported")

    sizes: dict[str, Any] = {field: integer(path, settings, key) for field, key in SIZES.items()}
    if settings.get("num_key_value_heads") is None:
        settings["num_key_value_heads"] = sizes["heads"]
    if settings.get("head_dim") is None and family != "qwen3":  # which always states it
        settings["head_dim"] = sizes["embed_size"] // sizes["heads"]
    kv_heads, head_size = integer(path, settings, "num_key_value_heads"), integer(path, settings, "head_dim")
    if sizes["heads"] % kv_heads:
        raise ValueError(
            f"{path}: num_attention_heads {sizes['heads']} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if head_size % 2:
        raise ValueError(f"{path}: head_dim {head_size} is odd, but rotary positions need pairs")
    return ModelConfig(
        **sizes,
        kv_heads=kv_heads,
        head_size=head_size,
        **_rope(path, settings),
        norm_eps=_positive(path, "rms_norm_eps", settings.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(settings.get("tie_word_embeddings", False)),
        family=family,
        max_positions=integer(path, settings, "max_position_embeddings"),
        param_dtype="bfloat16" if settings.get("dtype", settings.get("torch_dtype")) == "bfloat16" else "float32",
    )


def config_json(config: ModelConfig, end_ids: Sequence[int] = ()) -> Settings:
    """The content of config.json, with the keys that old and new versions of transformers read."""
    return {
        **({"eos_token_id": end_ids[0]} if end_ids else {}),
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        **{key: getattr(config, field) for field, key in SIZES.items()},
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": _rope_parameters(config) | {"rope_theta": config.rope_theta},
        **({"rope_scaling": _rope_parameters(config)} if config.rope_scaling.factor != 1 else {}),
        "tie_word_embeddings": config.tie_embeddings,
        "use_sliding_window": False,
        **{key: values[0] for key, values in SUPPORTED_BY_FAMILY[config.family].items()},
        "dtype": config.param_dtype,
        "torch_dtype": config.param_dtype,
    }


def generation_json(end_ids: Sequence[int]) -> Settings:
    """The content of generation_config.json: each of `end_ids` ends a generation, the last one is the padding."""
    return {"eos_token_id": list(end_ids), "pad_token_id": end_ids[-1]}


def read_settings(directory: str | Path) -> tuple[Path, Settings]:
    """(path, content) of a folder's config.json. Raises FileNotFoundError without folder or file."""
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"no folder {directory}: expected a Hugging Face model")
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no config.json: it is not a Hugging Face model folder")
    return path, read_json(path)


def check_supported(path: Path, settings: Settings, supported: Mapping[str, Iterable]) -> None:
    """Raises ValueError for the first setting with a value that is not among the supported ones."""
    for key, values in supported.items():
        if settings.get(key) not in values:
            raise ValueError(f"{path}: {key} = {settings[key]!r} is not supported, only {next(iter(values))!r} is")


def integer(path: Path, settings: Settings, key: str, *, minimum: int = 1) -> int:
    """An integer setting. Raises ValueError for anything else, and below the minimum."""
    value = settings.get(key)
    if type(value) is not int or value < minimum:
        raise ValueError(f"{path}: {key} is {value!r}, expected an integer of at least {minimum}")
    return value


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


def _rope(path: Path, settings: Settings) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`; transformers 5 writes both inside rope_parameters, older versions outside."""
    scaling = RopeScaling()
    for key in ("rope_parameters", "rope_scaling"):
        rope = settings.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3") or rope.get("partial_rotary_factor", 1) != 1:
            raise ValueError(f"{path}: {key} = {json.dumps(rope)} is not supported, only default and llama3 are")
        if kind == "llama3":
            values = {name: _positive(path, f"{key}.{theirs}", rope.get(theirs)) for name, theirs in SCALING.items()}
            original_positions = int(values.pop("original_positions"))
            scaling = RopeScaling(**values, original_positions=original_positions)
            if scaling.low_frequency_factor >= scaling.high_frequency_factor:
                low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
                raise ValueError(f"{path}: {key}: low_freq_factor {low} is not below high_freq_factor {high}")
    rope = settings.get("rope_parameters") or {}
    theta = _positive(path, "rope_theta", rope.get("rope_theta", settings.get("rope_theta")))
    return {"rope_theta": theta, "rope_scaling": scaling}


def _rope_parameters(config: ModelConfig) -> Settings:
    """The keys of config.json that describe the scaling."""
    if config.rope_scaling.factor == 1:
        return {"rope_type": "default"}
    return {"rope_type": "llama3", **{key: getattr(config.rope_scaling, name) for name, key in SCALING.items()}}


def _positive(path: Path, key: str, value: Any) -> float:
    if not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"{path}: {key} is {value!r}, expected a positive number")
    return float(value)
