"""GGUF files to Hugging Face folders. The quantised weights are read by transformers, and written as float32."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from memsearcher_jax.model import weights
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.hf_config import parse_config

LIBRARIES = ("torch", "accelerate", "gguf")  # the extra `gguf`
SCALED_ROPE = "rope_freqs.weight"


def convert(file: Path, directory: Path) -> ModelConfig:
    """Writes the Hugging Face folder of a GGUF file: config, float32 weights, tokenizer and chat template.

    The complete model is in memory. Raises FileNotFoundError or ValueError, in one line, for a file that is missing,
    damaged or of an unsupported model, and without the libraries of the extra `gguf`.
    """
    if missing := [name for name in LIBRARIES if importlib.util.find_spec(name) is None]:
        raise ValueError(f"GGUF files need {', '.join(missing)}: pip install 'memsearcher_jax[gguf]'")
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not file.is_file():
        raise FileNotFoundError(f"no file {file}")
    try:
        names = {tensor.name for tensor in GGUFReader(file).tensors}
        source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        model = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
        tokenizer: Any = AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # the two libraries raise any type for a damaged file
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{file} cannot be read as GGUF ({type(error).__name__}: {reason})") from error
    config = parse_config(file, _rounded(model.config))
    if SCALED_ROPE in names and config.rope_scaling.factor == 1:
        raise ValueError(f"{file} scales its rotary frequencies, which transformers does not read from GGUF")
    tensors = model.state_dict()

    def read(path: str, layer: int | None) -> np.ndarray:
        return tensors[weights.NAMES[path].format(layer)].numpy()

    end_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    weights.save_streamed(directory, config, read, tokenizer, end_ids=end_ids)
    return config


def _rounded(config: Any) -> Any:
    """The config with the shortest decimals of its numbers, which GGUF holds as float32: the published ones."""
    config.rms_norm_eps = _shortest(config.rms_norm_eps)
    config.rope_parameters = {name: _shortest(value) for name, value in config.rope_parameters.items()}
    config.quantization_config = None
    return config


def _shortest(value: Any) -> Any:
    return float(str(np.float32(value))) if isinstance(value, float) else value
