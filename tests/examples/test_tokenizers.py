"""The small tokenizers of the packaged weights, and the initial weights for the one of streams."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from examples.warmstart import tokenizers
from examples.warmstart.tokenizers import CALL_PARTS, EMBEDDING_ROWS, MEMALPHA, TINY
from memsearcher_jax.model import weights
from memsearcher_jax.tokenizer import ChatTokenizer

TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))
OLD, NEW = map(ChatTokenizer.load, (TINY, MEMALPHA))
CHAT = '<|im_start|>assistant\n<think>a</think>\n<tool_call>{"name": "x"}</tool_call><|im_end|>'


@pytest.mark.parametrize(
    ("name", "packaged"), [pytest.param("tiny", TINY, marks=pytest.mark.variant), ("tiny_memalpha", MEMALPHA)]
)
def test_packaged_tokenizers_are_reproducible(name, packaged, tmp_path):
    tokenizers.main([name, str(tmp_path)])
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / file).read_bytes() == (packaged / file).read_bytes(), "what it was made from has changed"


@pytest.mark.parity
def test_transformers_loads_the_same_tokenizer():
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(TINY)
    assert (reference.eos_token, reference.pad_token) == ("<|im_end|>", "<|endoftext|>")
    for text in (CHAT, "Zoë 漢字 \U0001f600 don't  \n\n x 12"):
        assert reference(text)["input_ids"] == TOKENIZER.encode(text).ids
        assert reference.decode(reference(text)["input_ids"]) == text


def test_the_extended_weights_keep_old_embeddings_and_new_ones_are_means(tmp_path):
    tokenizers.main(["extend", str(tmp_path / "base")])
    config, params = weights.load(tmp_path / "base", dtype="float32")
    embed_VD = np.asarray(params["embed"])
    old_VD = np.asarray(weights.load(TINY, dtype="float32")[1]["embed"])[: OLD.vocab_size]
    assert config.vocab_size == len(embed_VD) == EMBEDDING_ROWS >= NEW.vocab_size
    np.testing.assert_array_equal(embed_VD[: OLD.vocab_size], old_VD)
    for text in (*CALL_PARTS, " met", "January"):
        (id,) = NEW.encode_untrusted(text)
        np.testing.assert_allclose(embed_VD[id], old_VD[list(OLD.encode_untrusted(text))].mean(axis=0), atol=1e-6)
    assert (tmp_path / "base" / "tokenizer.json").read_bytes() == (MEMALPHA / "tokenizer.json").read_bytes()
