"""Text encoders of the BERT family: a Hugging Face folder to weights, token ids to one unit vector per text.

Devlin et al., "BERT" (2019): post-norm blocks with absolute positions, here without dropout or the pooler. A text's
vector is the mean of its tokens (E5: Wang et al., "Text Embeddings by Weakly-Supervised Contrastive Pre-training",
2022, section 3; MiniLM sentence encoders) or its first token, normalised to length 1.
Weights have the shapes of the Hugging Face files (output before input), stacked over layers.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from memsearcher_jax.model.hf_config import (
    SIZES,
    SUPPORTED,
    check_settings,
    read_json,
    read_settings,
    read_sizes,
    resolve_inside,
)
from memsearcher_jax.model.qwen import Params, param_path
from memsearcher_jax.model.safetensors_files import check_tensors, finite, open_files

FAMILIES = {"bert": 0, "roberta": 1, "xlm-roberta": 1}
"""model_type -> 1 where positions start after the padding id (RoBERTa), 0 where they start at 0."""

ENCODER_SIZES = SIZES | {"positions": "max_position_embeddings", "types": "type_vocab_size"}

SUPPORTED_ENCODER = SUPPORTED | {
    "hidden_act": ("gelu",),
    "is_causal": (False, None),
    "position_embedding_type": ("absolute", None),
}
"""Settings that change the numbers -> the values that this encoder implements, by default the first."""

READ_OR_HARMLESS = {
    *(*ENCODER_SIZES.values(), "model_type", "layer_norm_eps", "pad_token_id"),
    *("attention_probs_dropout_prob", "classifier_dropout", "directionality", "dtype"),
    *("hidden_dropout_prob", "output_past", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type", "tie_word_embeddings", "torch_dtype"),
}
"""Keys of config.json that are read here, and those of dropout, the pooler and the type of the weights."""

SENTENCE_CONFIG = "config_sentence_transformers.json"
MODULES = {"Transformer", "Pooling", "Normalize"}
"""Supported modules of a sentence-transformers encoder; vectors are normalised in any case."""

POOLING_MODES: dict[str, Literal["mean", "cls"]] = {
    "mean": "mean",
    "cls": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
"""Mode in the settings of a Pooling module, which old files write as a flag -> `EncoderConfig.pooling`."""

WEIGHTS = {
    "word": ("embeddings.word_embeddings.weight", "vocab_size embed_size"),
    "position": ("embeddings.position_embeddings.weight", "positions embed_size"),
    "type": ("embeddings.token_type_embeddings.weight", "types embed_size"),
    "embed_scale": ("embeddings.LayerNorm.weight", "embed_size"),
    "embed_shift": ("embeddings.LayerNorm.bias", "embed_size"),
    "layers.wq": ("encoder.layer.{}.attention.self.query.weight", "layers embed_size embed_size"),
    "layers.bq": ("encoder.layer.{}.attention.self.query.bias", "layers embed_size"),
    "layers.wk": ("encoder.layer.{}.attention.self.key.weight", "layers embed_size embed_size"),
    "layers.bk": ("encoder.layer.{}.attention.self.key.bias", "layers embed_size"),
    "layers.wv": ("encoder.layer.{}.attention.self.value.weight", "layers embed_size embed_size"),
    "layers.bv": ("encoder.layer.{}.attention.self.value.bias", "layers embed_size"),
    "layers.wo": ("encoder.layer.{}.attention.output.dense.weight", "layers embed_size embed_size"),
    "layers.bo": ("encoder.layer.{}.attention.output.dense.bias", "layers embed_size"),
    "layers.attention_scale": ("encoder.layer.{}.attention.output.LayerNorm.weight", "layers embed_size"),
    "layers.attention_shift": ("encoder.layer.{}.attention.output.LayerNorm.bias", "layers embed_size"),
    "layers.up": ("encoder.layer.{}.intermediate.dense.weight", "layers ffn_size embed_size"),
    "layers.up_bias": ("encoder.layer.{}.intermediate.dense.bias", "layers ffn_size"),
    "layers.down": ("encoder.layer.{}.output.dense.weight", "layers embed_size ffn_size"),
    "layers.down_bias": ("encoder.layer.{}.output.dense.bias", "layers embed_size"),
    "layers.ffn_scale": ("encoder.layer.{}.output.LayerNorm.weight", "layers embed_size"),
    "layers.ffn_shift": ("encoder.layer.{}.output.LayerNorm.bias", "layers embed_size"),
}
"""Parameter path -> (tensor name, in which {} is the layer, fields of `EncoderConfig` that make the shape)."""

PREFIXES = ("", "bert.", "roberta.")
"""Prefixes of all tensor names; a larger model saves its encoder under one."""


@dataclass(frozen=True)
class EncoderConfig:
    """A post-norm BERT with absolute positions, and its pooling. Defaults: the shape of e5-base-v2."""

    vocab_size: int = 30_522  # V
    embed_size: int = 768  # D, also the size of a text's vector
    ffn_size: int = 3_072  # F
    layers: int = 12  # L
    heads: int = 12  # N
    positions: int = 512  # rows of the position table
    first_position: int = 0  # row of that table for the first token
    types: int = 2  # rows of the segment table, of which only the first is used
    norm_eps: float = 1e-12
    pad_id: int = 0
    pooling: Literal["mean", "cls"] = "mean"
    max_tokens: int = 512  # longest text, special tokens included
    lower_case: bool = False  # applied before the tokenizer, which may lower-case too
    query_prompt: str = ""  # prepended to every query; empty where the folder states none
    passage_prompt: str = ""


def param_specs(config: EncoderConfig) -> Params:
    """The shapes and types of the weights: a nested dict, whose leaves under "layers" are stacked."""
    specs: Params = {"layers": {}}
    for path, (_, axes) in WEIGHTS.items():
        shape = tuple(getattr(config, axis) for axis in axes.split())
        tree = specs["layers"] if path.startswith("layers.") else specs
        tree[path.removeprefix("layers.")] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return specs


def load(directory: str | Path) -> tuple[EncoderConfig, Params]:
    """(config, params): float32 numpy arrays in the tree of `param_specs`, for the caller to place on devices.

    Tensors outside the encoder, such as a pooler or a head, are not read.
    Raises FileNotFoundError or ValueError, in one line, for an incomplete folder or another family of models.
    """
    directory = Path(directory)
    config = read_config(directory)
    with ExitStack() as stack:
        files = open_files(directory, stack)
        prefixes = [prefix for prefix in PREFIXES if prefix + WEIGHTS["word"][0] in files]
        if not prefixes:
            raise ValueError(
                f"{directory} lacks the tensor {WEIGHTS['word'][0]}: it holds no encoder of the BERT family"
            )

        def load_weight(path: tuple, spec: jax.ShapeDtypeStruct) -> np.ndarray:
            name = prefixes[0] + WEIGHTS[param_path(path)][0]
            stacked = "{}" in name
            names = [name.format(layer) for layer in range(config.layers)] if stacked else [name]
            shape: tuple[int, ...] = spec.shape[1:] if stacked else spec.shape
            check_tensors(directory, files, dict.fromkeys(names, shape))
            weights = [finite(directory, name, files[name].get_tensor(name).astype(np.float32)) for name in names]
            return np.stack(weights) if stacked else weights[0]

        return config, jax.tree.map_with_path(load_weight, param_specs(config))


def read_config(directory: str | Path) -> EncoderConfig:
    """The encoder of a folder. Without sentence-transformers' `modules.json` the pooling is the mean, as for E5.

    Raises FileNotFoundError without folder or config.json, ValueError for an unsupported encoder.
    """
    path, settings = read_settings(directory)
    model_type = settings.model_type
    if model_type not in FAMILIES:
        raise ValueError(f"{path}: model_type is {model_type!r}, expected one of {', '.join(FAMILIES)}")
    check_settings(path, settings, SUPPORTED_ENCODER, READ_OR_HARMLESS)
    sizes = read_sizes(path, settings, ENCODER_SIZES)
    if sizes["embed_size"] % sizes["heads"]:
        raise ValueError(
            f"{path}: hidden_size {sizes['embed_size']} is not a multiple of num_attention_heads {sizes['heads']}"
        )
    pad_id = settings.pad_token_id
    if pad_id is None:
        raise ValueError(f"{path}: pad_token_id is missing: set it to the id of the tokenizer's padding token")
    first_position = (pad_id + 1) * FAMILIES[model_type]
    return EncoderConfig(
        **sizes,
        first_position=first_position,
        norm_eps=settings.layer_norm_eps,
        pad_id=pad_id,
        **_sentence_settings(path.parent, sizes["positions"] - first_position),
    )


def hidden_states(params: Params, config: EncoderConfig, ids_BT: Array, length_B: Array) -> Array:
    """hidden_BTD, float32; the output at padding is undefined.

    Row b's tokens are its first `length_B[b]`, at least 1; the rest is padding. T may be at most
    `config.positions - config.first_position`.
    """
    c = config
    D = c.embed_size
    N = c.heads
    T = ids_BT.shape[1]
    mask_BT = jnp.arange(T) < length_B[:, None]

    def layer(x_BTD: Array, w: Params) -> tuple[Array, None]:
        """Attention, add, norm, feed-forward, add, norm."""

        def heads(weight: Array, bias: Array) -> Array:
            return jnp.einsum("BTD,NHD->BTNH", x_BTD, weight.reshape(N, -1, D)) + bias.reshape(N, -1)

        q_BTNH = heads(w["wq"], w["bq"])
        k_BTNH = heads(w["wk"], w["bk"])
        v_BTNH = heads(w["wv"], w["bv"])
        mask_B11T = mask_BT[:, None, None]  # to the real tokens of its row
        out_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BTNH, v_BTNH, mask=mask_B11T)
        x_BTD += jnp.einsum("BTNH,DNH->BTD", out_BTNH, w["wo"].reshape(D, N, -1)) + w["bo"]
        x_BTD = layer_norm(x_BTD, w["attention_scale"], w["attention_shift"], c.norm_eps)
        ffn_BTF = jax.nn.gelu(jnp.einsum("BTD,FD->BTF", x_BTD, w["up"]) + w["up_bias"], approximate=False)
        x_BTD += jnp.einsum("BTF,DF->BTD", ffn_BTF, w["down"]) + w["down_bias"]
        return layer_norm(x_BTD, w["ffn_scale"], w["ffn_shift"], c.norm_eps), None

    position_TD = params["position"][c.first_position : c.first_position + T]
    embedded_BTD = params["word"][ids_BT] + position_TD + params["type"][0]
    x_BTD = layer_norm(embedded_BTD, params["embed_scale"], params["embed_shift"], c.norm_eps)
    last_BTD, _ = jax.lax.scan(layer, x_BTD, params["layers"])
    return last_BTD


def encode(params: Params, config: EncoderConfig, ids_BT: Array, length_B: Array) -> Array:
    """vector_BD, float32, of length 1: the pooled `hidden_states` of each row."""
    hidden_BTD = hidden_states(params, config, ids_BT, length_B)
    if config.pooling == "cls":
        pooled_BD = hidden_BTD[:, 0]
    else:
        mask_BT = jnp.arange(ids_BT.shape[1]) < length_B[:, None]
        pooled_BD = jnp.sum(hidden_BTD * mask_BT[..., None], axis=1) / length_B[:, None]
    return pooled_BD / jnp.linalg.norm(pooled_BD, axis=-1, keepdims=True)


def layer_norm(x_BTD: Array, scale_D: Array, shift_D: Array, eps: float) -> Array:
    """(x - mean) / sqrt(variance + eps) * scale + shift. Ba et al. 2016, eq. 4."""
    centred_BTD = x_BTD - jnp.mean(x_BTD, axis=-1, keepdims=True)
    inverse_BT1 = jax.lax.rsqrt(jnp.mean(jnp.square(centred_BTD), axis=-1, keepdims=True) + eps)
    return centred_BTD * inverse_BT1 * scale_D + shift_D


def _sentence_settings(directory: Path, limit: int) -> dict[str, Any]:
    """Fields that sentence-transformers stores in separate files; `limit` is the longest text that positions allow."""
    files = sorted(directory.glob("sentence_*_config.json"))  # sentence_bert_config.json, and older names
    transformer = read_json(files[0]) if files else {}
    tokenizer = optional_json(directory / "tokenizer_config.json")  # has the limit alone since version 5.4
    tokens = transformer.get("max_seq_length") or tokenizer.get("model_max_length") or limit
    if not isinstance(tokens, int | float) or tokens < 1:
        raise ValueError(f"{directory}: max_seq_length or model_max_length is {tokens!r}, expected a number of tokens")
    sentence = optional_json(file := directory / SENTENCE_CONFIG)
    prompts = sentence.get("prompts") or {}
    default = sentence.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ValueError(f"{file}: prompts must be an object of texts: copy it again")
    if sentence.get("truncate_dim"):
        raise ValueError(f"{file}: truncate_dim is not supported: remove it there, for whole vectors")

    def prompt(*names: str) -> str:
        """The first of these prompts that is not empty; the default prompt if the folder states none of them."""
        stated = [prompts[name] for name in names if prompts.get(name) is not None]
        if not stated:
            return prompts.get(default) or ""
        for text in stated:
            if text:
                return text
        return ""

    return {
        "pooling": _pooling(directory),
        "max_tokens": int(min(tokens, limit)),
        "lower_case": bool(transformer.get("do_lower_case", False)),
        "query_prompt": prompt("query"),
        "passage_prompt": prompt("document", "passage", "corpus"),
    }


def _pooling(directory: Path) -> Literal["mean", "cls"]:
    index = directory / "modules.json"
    if not index.is_file():
        return "mean"
    entries = read_json(index, kind=list)
    if not all(isinstance(entry, dict) and isinstance(entry.get("type"), str) for entry in entries):
        raise ValueError(f"{index} has an entry without a type: copy it again")
    modules = {entry["type"].rpartition(".")[2]: entry.get("path", "") for entry in entries}
    if unknown := sorted(set(modules) - MODULES):
        raise ValueError(f"{index}: module {unknown[0]} is not supported, only {', '.join(sorted(MODULES))} are")
    if "Pooling" not in modules:
        raise ValueError(f"{index} lists no Pooling module, which makes one vector of a text")
    similarity = optional_json(file := directory / SENTENCE_CONFIG).get("similarity_fn_name")
    if "Normalize" not in modules and similarity not in (None, "cosine"):
        raise ValueError(f"{file}: similarity_fn_name {similarity!r} depends on lengths, only 'cosine' is supported")
    path = resolve_inside(directory, modules["Pooling"], named_by=index) / "config.json"
    settings = optional_json(path)
    if not settings.get("include_prompt", True):
        raise ValueError(f"{path}: include_prompt = False is not supported, only True is")
    # One name or a list since version 5.4 of the library, before that one boolean per mode.
    modes = settings.get("pooling_mode") or sorted(
        key for key, on in settings.items() if key.startswith("pooling_mode_") and on is True
    )
    modes = [modes] if isinstance(modes, str) else modes
    if len(modes) != 1 or modes[0] not in POOLING_MODES:
        raise ValueError(f"{path}: pools by {' and '.join(modes) or 'nothing'}; only mean or only cls is supported")
    return POOLING_MODES[modes[0]]


def optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
