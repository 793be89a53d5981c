"""GGUF files to Hugging Face folders: every key and tensor is read, or known to change nothing, or refused by name.

Weights become float32. Names and layouts are those of llama.cpp, which writes the queries and keys of a llama model
with the two halves of a head interleaved.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from memsearcher_jax.model import weights
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.hf_config import ARCHITECTURES, check_heads, transformers

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor name -> shape."""

SIZES = {
    "layers": "block_count",
    "max_positions": "context_length",
    "embed_size": "embedding_length",
    "ffn_size": "feed_forward_length",
    "heads": "attention.head_count",
}
"""Field of `ModelConfig` -> the key that states it, after "llama." or "qwen2."."""

NORM_EPS = "attention.layer_norm_rms_epsilon"
READ = {*SIZES.values(), "attention.head_count_kv", "attention.key_length", "rope.freq_base", NORM_EPS}

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (1.0, 0.0),
}
"""Other keys that may change the numbers -> the values that do not."""

HARMLESS_TOKENIZER = re.compile(r"ggml\.\w+_token_id|chat_templates?(\.\w+)?|huggingface\.json|ggml\.token_type_count")
"""Ids of tokens that no template here uses, further templates, and a copy of what the other keys describe."""


def convert(file: Path, directory: Path) -> ModelConfig:
    """Writes the Hugging Face folder of a GGUF file: config, float32 weights, tokenizer and chat template.

    One tensor is in memory at a time. Raises FileNotFoundError or ValueError, in one line, for a file that is missing,
    damaged, incomplete or of an unsupported model, and without the library of the extra `gguf`.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("GGUF files need gguf: pip install 'memsearcher_jax[gguf]'")
    from gguf import MODEL_ARCH, GGUFReader, dequantize, get_tensor_name_map

    if not file.is_file():
        raise FileNotFoundError(f"no file {file}")
    try:
        reader = GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        stored = {tensor.name: tensor for tensor in reader.tensors}
    except Exception as error:  # the library raises any type for a damaged file
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{file} cannot be read as GGUF ({type(error).__name__}: {reason})") from error
    shapes = {name: tuple(tensor.shape.tolist()[::-1]) for name, tensor in stored.items()}
    config = _read_config(file, fields, shapes)
    translate = get_tensor_name_map(MODEL_ARCH.QWEN3, config.layers)  # the names of all three families
    expected: dict[str, tuple[int, ...]] = {}
    by_weight: dict[tuple[str, int | None], str] = {}  # the name in the file
    for tensor in weights.tensors(config):
        name = translate.get_name(tensor.name, (".weight", ".bias")) or tensor.name
        expected[name] = tensor.shape
        by_weight[tensor.path, tensor.layer] = name
    _check_tensors(file, config, shapes, expected)
    tokenizer = _read_tokenizer(file, fields)

    def read(path: str, layer: int | None) -> np.ndarray:
        name = by_weight[path, layer]
        try:
            value = dequantize(stored[name].data, stored[name].tensor_type).reshape(shapes[name])
        except NotImplementedError as error:
            raise ValueError(f"{file}: the tensor {name} cannot be read: {error}; use another quantization") from error
        heads = {"layers.wq": config.heads, "layers.wk": config.kv_heads}.get(path)
        if config.family != "llama" or heads is None:
            return value
        return value.reshape(heads, -1, 2, config.embed_size).swapaxes(1, 2).reshape(value.shape)

    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    end_ids = tuple(dict.fromkeys(id for id in ends if id is not None))
    weights.save_streamed(directory, config, read, tokenizer, end_ids=end_ids)
    return config


def _read_config(file: Path, fields: dict[str, Any], shapes: Shapes) -> ModelConfig:
    if (parts := fields.get("split.count", 0)) not in (0, 1):
        raise ValueError(f"{file} is one of {parts} parts: join them with llama.cpp's llama-gguf-split --merge")
    family = fields.get("general.architecture")
    if family not in ARCHITECTURES:
        raise ValueError(f"{file}: general.architecture is {family!r}, expected one of {', '.join(ARCHITECTURES)}")
    prefix = f"{family}."
    # Programs that run the file read no others; `_read_tokenizer` accounts for those of the tokenizer.
    own = {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}
    if missing := [key for key in (*SIZES.values(), NORM_EPS) if key not in own]:
        raise ValueError(f"{file} lacks the key {prefix}{missing[0]}")
    for key in sorted(READ & own.keys()):
        if not isinstance(own[key], int | float) or not 0 < own[key] < math.inf:  # models may have a list, by layer
            raise ValueError(f"{file}: {prefix}{key} = {own[key]!r} is not supported, only a positive number is")
    sizes: dict[str, Any] = {field: int(own[key]) for field, key in SIZES.items()}
    kv_heads = int(own.get("attention.head_count_kv", sizes["heads"]))
    check_heads(file, sizes["heads"], kv_heads)
    head_size = int(own.get("attention.key_length", sizes["embed_size"] // sizes["heads"]))
    if "token_embd.weight" not in shapes:
        raise ValueError(f"{file}: the tensor token_embd.weight is missing")
    vocab_size = shapes["token_embd.weight"][0]
    stated = {"attention.value_length": (head_size,), "rope.dimension_count": (head_size,), "vocab_size": (vocab_size,)}
    for key, value in own.items():
        accepted = (SUPPORTED | stated).get(key)
        if accepted and value not in accepted:
            raise ValueError(f"{file}: {prefix}{key} = {value!r} is not supported, only {accepted[0]!r} is")
        if not accepted and key not in READ:
            raise ValueError(f"{file}: the key {key} is not known: this program may read the file wrongly")
    return ModelConfig(
        **sizes,
        vocab_size=vocab_size,
        kv_heads=kv_heads,
        head_size=head_size,
        rope_theta=_shortest(own.get("rope.freq_base", 10_000.0)),
        norm_eps=_shortest(own[NORM_EPS]),
        tie_embeddings="output.weight" not in shapes,
        family=family,
    )


def _check_tensors(file: Path, config: ModelConfig, shapes: Shapes, expected: Shapes) -> None:
    """Raises ValueError unless the file holds the tensors of this model and no others."""
    for name, shape in expected.items():
        if shapes.get(name) != shape:
            found = f"is {list(shapes[name])}" if name in shapes else "is missing"
            raise ValueError(f"{file}: the tensor {name} {found}, but its keys imply {list(shape)}")
    if unexpected := sorted(shapes.keys() - expected.keys()):
        raise ValueError(f"{file} holds {unexpected[0]}, which a {config.family} model here does not have")


def _read_tokenizer(file: Path, fields: dict[str, Any]) -> Any:
    """The tokenizer of transformers that the file describes."""
    transformers()
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping

    found = {name.removeprefix("tokenizer."): value for name, value in fields.items() if name.startswith("tokenizer.")}

    def take(group: str) -> dict[str, Any]:
        """Moves the keys of a group out of `found`, under the names that the library gives them."""
        names = mapping.GGUF_TOKENIZER_MAPPING[group]
        return {name: found.pop(key) for key, name in names.items() if key in found}

    parts = take("tokenizer")
    settings = take("tokenizer_config")
    if unknown := [key for key in found if not HARMLESS_TOKENIZER.fullmatch(key)]:
        raise ValueError(f"{file}: the key tokenizer.{unknown[0]} is not known: this program may read the file wrongly")
    # Text is split as for GPT-2 where the library does not know the name; SmolLM's merges have no digits in any case.
    known = {"gpt-2", "smollm", *mapping.GGUF_PRE_TOKENIZER_SPLITS}
    if parts.get("tokenizer_type") == "gpt2" and (pre := parts.get("pre_tokenizer_type")) not in known:
        raise ValueError(f"{file}: tokenizer.ggml.pre is {pre!r}, which is not known: text would be split wrongly")
    if parts.get("tokenizer_type") == "llama" and not parts.get("add_prefix_space", True):
        raise ValueError(f"{file}: tokenizer.ggml.add_space_prefix = False is not supported, only True is")
    specials = {f"{name}_token": parts.get(f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}
    tokens: dict[Any, str] = dict(enumerate(parts.get("tokens", ())))
    if unknown := [f"{name} {id}" for name, id in specials.items() if id is not None and id not in tokens]:
        raise ValueError(f"{file}: {unknown[0]} is none of its {len(tokens)} tokens")
    settings |= {name: tokens.get(id) for name, id in specials.items()}
    try:
        backend, _ = mapping.convert_gguf_tokenizer(fields["general.architecture"], parts)
    except Exception as error:  # of many types
        raise ValueError(f"{file}: its tokenizer cannot be read: {' '.join(str(error).split())[:200]}") from error
    # The library adds its own special tokens, such as <|endoftext|>, to a vocabulary that has none of that name.
    definition = json.loads(backend.to_str())
    definition["added_tokens"] = [token for token in definition["added_tokens"] if token["id"] < len(tokens)]
    backend = Tokenizer.from_str(json.dumps(definition))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    if len(tokenizer) > len(tokens):
        raise ValueError(f"{file}: its special tokens are read as others: use the model's Hugging Face folder")
    return tokenizer


def _shortest(value: float) -> float:
    """The shortest decimal of a number that GGUF holds as float32: the published one."""
    return float(str(np.float32(value)))
