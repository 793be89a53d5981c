"""Hugging Face folders of small random text encoders, for the tests of `bert` and of `text_encoder`."""

import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from memsearcher_jax.encoders import bert
from memsearcher_jax.encoders.bert import WEIGHTS, EncoderConfig
from memsearcher_jax.model.qwen import Params, param_path

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz0123456789:?.", "query", "passage", "town"]
SMALL = EncoderConfig(vocab_size=64, embed_size=24, ffn_size=40, layers=2, heads=3, positions=96, max_tokens=96)


def word_pieces() -> Tokenizer:
    """A WordPiece tokenizer like that of BERT, with padding and truncation enabled as in published files."""
    vocab = {word: row for row, word in enumerate([*WORDS, *(f"##{word}" for word in WORDS[4:-3])][:64])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])]
    )
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=5)
    return tokenizer


def make_params(config: EncoderConfig) -> Params:
    """Random weights: the zeros and ones of `init` hide bugs."""
    rng = np.random.RandomState(0)
    return jax.tree.map(lambda x: (0.3 * rng.standard_normal(x.shape)).astype(np.float32), bert.param_specs(config))


def write_encoder(directory: Path, prefix: str = "") -> Params:
    """Writes the encoder SMALL with its tokenizer; returns its weights."""
    sizes = {file_key: getattr(SMALL, field) for field, file_key in bert.ENCODER_SIZES.items()}
    (directory / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_act": "gelu", **sizes}))
    word_pieces().save(str(directory / "tokenizer.json"))
    params, tensors = make_params(SMALL), {"cls.predictions.bias": np.zeros(64, np.float32)}
    for path, weight in jax.tree.leaves_with_path(params):
        name = WEIGHTS[param_path(path)][0]
        layers = range(SMALL.layers) if "{}" in name else [None]
        tensors |= {
            prefix + name.format(layer): np.ascontiguousarray(weight if layer is None else weight[layer])
            for layer in layers
        }
    save_file(tensors, directory / "model.safetensors")
    return params
