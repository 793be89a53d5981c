"""What a Hugging Face folder with a text encoder describes: the BERT family, and how it turns tokens into one vector.

Read are `config.json` and, where sentence-transformers wrote the folder, its `modules.json`, the pooling, the longest
text and the prompts. No JAX here. What this encoder cannot do is refused by name, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from memsearcher_jax.model.hf_config import inside, read_json

SIZES = {
    "vocab_size": "vocab_size",
    "embed_size": "hidden_size",
    "ffn_size": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
}
"""Our field -> theirs, for those that every config.json must state."""

ACTIVATIONS: dict[str, Literal["gelu", "gelu_tanh", "relu"]] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Their `hidden_act` -> ours; "gelu" is the exact one."""

FAMILIES = {"bert": 0, "roberta": 1, "xlm-roberta": 1}
"""model_type -> 1 where positions are counted from behind the padding id (RoBERTa), 0 where they begin at 0."""

UNSUPPORTED_UNLESS = {
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "quantization_config": (None,),
}
"""Settings of theirs that change the numbers, and the only values that this encoder computes."""

MODULES = {"Transformer", "Pooling", "Normalize"}
"""What a sentence encoder may consist of; its vectors are brought to norm 1 in any case."""


@dataclass(frozen=True)
class EncoderConfig:
    """A post-norm BERT with absolute positions, and its pooling. Defaults: the shape of e5-base-v2."""

    vocab_size: int = 30_522  # V
    embed_size: int = 768  # D, also the size of the vector of a text
    ffn_size: int = 3_072  # F
    layers: int = 12  # L
    heads: int = 12  # N
    positions: int = 512  # rows of the position table
    first_position: int = 0  # row of that table for the first token
    types: int = 2  # rows of the segment table, of which texts use the first
    norm_eps: float = 1e-12
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"
    pad_id: int = 0
    pooling: Literal["mean", "cls"] = "mean"
    max_tokens: int = 512  # longest text, special tokens included
    lower_case: bool = False  # before the tokenizer, beside what that does itself
    query_prompt: str = ""  # in front of every query; empty where the folder names none
    passage_prompt: str = ""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def head_size(self) -> int:
        return self.embed_size // self.heads


def read_encoder_config(directory: str | Path) -> EncoderConfig:
    """The encoder that a folder describes. A folder without `modules.json` is pooled by the mean, as E5 is.

    Raises FileNotFoundError without folder or config.json, ValueError for anything but an encoder that we implement.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"no folder {directory}: expected a Hugging Face encoder")
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no config.json: it is not a Hugging Face encoder's folder")
    theirs = read_json(path)
    if theirs.get("model_type") not in FAMILIES:
        raise ValueError(f"{path}: model_type is {theirs.get('model_type')!r}, expected one of {', '.join(FAMILIES)}")
    for name, values in UNSUPPORTED_UNLESS.items():
        if theirs.get(name) not in values:
            raise ValueError(f"{path}: {name} = {theirs[name]!r} is not supported, only {values[0]!r} is")
    if theirs.get("hidden_act") not in ACTIVATIONS:
        raise ValueError(
            f"{path}: hidden_act is {theirs.get('hidden_act')!r}, expected one of {', '.join(ACTIVATIONS)}"
        )
    sizes = {ours: _whole(path, theirs, name, least=1) for ours, name in SIZES.items()}
    if sizes["embed_size"] % sizes["heads"]:
        raise ValueError(
            f"{path}: hidden_size {sizes['embed_size']} is no multiple of num_attention_heads {sizes['heads']}"
        )
    positions = _whole(path, theirs, "max_position_embeddings", least=1)
    pad_id = _whole(path, {"pad_token_id": 0} | theirs, "pad_token_id", least=0)
    first = (pad_id + 1) * FAMILIES[theirs["model_type"]]
    return EncoderConfig(
        **sizes,
        positions=positions,
        first_position=first,
        types=_whole(path, theirs, "type_vocab_size", least=1),
        norm_eps=float(theirs.get("layer_norm_eps", 1e-12)),
        activation=ACTIVATIONS[theirs["hidden_act"]],
        pad_id=pad_id,
        **_sentence_settings(directory, positions - first),
    )


def _sentence_settings(directory: Path, most_tokens: int) -> dict[str, Any]:
    """Fields that sentence-transformers keeps in files of its own."""
    transformer = _optional(directory / "sentence_bert_config.json")
    prompts = _optional(directory / "config_sentence_transformers.json").get("prompts") or {}
    return {
        "pooling": _pooling(directory),
        "max_tokens": min(transformer.get("max_seq_length") or most_tokens, most_tokens),
        "lower_case": bool(transformer.get("do_lower_case", False)),
        "query_prompt": prompts.get("query", ""),
        "passage_prompt": prompts.get("passage", prompts.get("document", "")),
    }


def _pooling(directory: Path) -> Literal["mean", "cls"]:
    listed = directory / "modules.json"
    if not listed.is_file():
        return "mean"
    modules = read_json(listed, kind=list)
    kinds = {module["type"].rpartition(".")[2]: module.get("path", "") for module in modules}
    if unknown := sorted(set(kinds) - MODULES):
        raise ValueError(f"{listed}: module {unknown[0]} is not supported, only {', '.join(sorted(MODULES))} are")
    if "Pooling" not in kinds:
        raise ValueError(f"{listed}: names no Pooling, so there is no vector of a whole text")
    path = inside(directory, kinds["Pooling"], said_by=listed) / "config.json"
    settings = _optional(path)
    chosen = sorted(name for name, on in settings.items() if name.startswith("pooling_mode_") and on is True)
    if chosen not in (["pooling_mode_mean_tokens"], ["pooling_mode_cls_token"]):
        raise ValueError(f"{path}: pools by {' and '.join(chosen) or 'nothing'}; mean or cls alone is supported")
    return "cls" if chosen == ["pooling_mode_cls_token"] else "mean"


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _whole(path: Path, theirs: dict[str, Any], name: str, *, least: int) -> int:
    value = theirs.get(name)
    if type(value) is not int or value < least:
        raise ValueError(f"{path}: {name} is {value!r}, expected a whole number from {least}")
    return value
