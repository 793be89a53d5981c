"""GGUF files: the folder that is written computes what transformers computes from the file."""

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from memsearcher_jax.launch import import_gguf
from memsearcher_jax.model import gguf_file, qwen, weights

SPECIALS = ("<|begin_of_text|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
NO_PREFIX = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_space_prefix": False}
MERGES = ("t h", "th e", "Ġ the")


def test_a_missing_library_is_named_with_its_extra(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        import_gguf.main([str(tmp_path / "x.gguf"), "--out", str(tmp_path / "out")])
    assert capsys.readouterr().err == "error: GGUF files need gguf: pip install 'memsearcher_jax[gguf]'\n"
    assert not (tmp_path / "out").exists()


@pytest.fixture
def libraries():
    return tuple(pytest.importorskip(name) for name in ("torch", "transformers", "gguf", "accelerate"))


@pytest.fixture
def write_gguf(tmp_path):
    """(architecture, quantization, tied=True, end_id=2, without=(), extra={}, keys={}) -> a small GGUF file."""
    gguf = pytest.importorskip("gguf")

    def write(
        architecture: str,
        quantization: str,
        *,
        tied: bool = True,
        end_id: int | None = 2,
        without: Sequence[str] = (),  # tensors
        extra: Mapping[str, Sequence[int]] = MappingProxyType({}),  # shapes of more tensors
        keys: Mapping[str, Any] = MappingProxyType({}),  # more keys
    ) -> Path:
        D, F, N, K, H, layers = 64, 96, 2, 1, 32, 2
        path = tmp_path / "small.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        sizes = ("block_count", layers), ("context_length", 128), ("embedding_length", D), ("feed_forward_length", F)
        for name, size in (*sizes, ("head_count", N), ("head_count_kv", K), ("rope_freq_base", 100_000.0)):
            getattr(writer, f"add_{name}")(size)
        writer.add_layer_norm_rms_eps(1e-5)
        bytes_ = sorted(bytes_to_unicode().values())
        tokens = [*SPECIALS, *bytes_, *(merge.replace(" ", "") for merge in MERGES)]
        writer.add_vocab_size(len(tokens))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        kinds = gguf.TokenType
        writer.add_token_types([kinds.CONTROL] * len(SPECIALS) + [kinds.NORMAL] * (len(tokens) - len(SPECIALS)))
        writer.add_token_merges(list(MERGES))
        writer.add_bos_token_id(1)
        if end_id is not None:
            writer.add_eos_token_id(end_id)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(2)
        writer.add_chat_template(TEMPLATE)

        rng = np.random.default_rng(0)
        for key, value in keys.items():
            kinds = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            for shard in writer.kv_data:  # in place of one from above
                shard.pop(key, None)
            (kinds | {list: writer.add_array})[type(value)](key, value)

        def add(name: str, *shape: int) -> None:
            if name in without:
                return
            values = (0.3 * rng.standard_normal(shape)).astype(np.float32)
            kind = gguf.GGMLQuantizationType[quantization if len(shape) == 2 else "F32"]
            data = values.astype(np.float64) if kind.name == "F64" else gguf.quants.quantize(values, kind)
            writer.add_tensor(name, data, raw_dtype=kind)

        add("token_embd.weight", len(tokens), D)
        for layer in range(layers):
            add(f"blk.{layer}.attn_norm.weight", D)
            for name, size in (("q", N * H), ("k", K * H), ("v", K * H)):
                add(f"blk.{layer}.attn_{name}.weight", size, D)
                if architecture == "qwen2":
                    add(f"blk.{layer}.attn_{name}.bias", size)
            ffn = ("gate", F, D), ("up", F, D), ("down", D, F), ("norm", D)
            for name, *shape in (("attn_output", D, N * H), *((f"ffn_{name}", *shape) for name, *shape in ffn)):
                add(f"blk.{layer}.{name}.weight", *shape)
        add("output_norm.weight", D)
        if not tied:
            add("output.weight", len(tokens), D)
        for name, shape in extra.items():
            add(name, *shape)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def same_logits(file: Path, folder: Path, libraries, ids_BT) -> None:
    torch, transformers, *_ = libraries
    theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    with torch.no_grad():
        expected_BTV = theirs(torch.from_numpy(ids_BT).long()).logits.numpy()
    config, params = weights.load(folder)
    position_BT = np.tile(np.arange(ids_BT.shape[1]), (len(ids_BT), 1))
    config = weights.replace(config, compute_dtype="float32")
    forward = jax.jit(qwen.forward, static_argnames="config")
    actual_BTV, _ = forward(params, config, ids_BT, position_BT, np.ones_like(ids_BT))
    np.testing.assert_allclose(actual_BTV, expected_BTV, atol=2e-4, rtol=2e-4)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("architecture", "quantization", "tied"),
    [("llama", "F32", True), ("llama", "Q8_0", False), ("qwen2", "Q4_1", True)],
)
def test_logits_equal_those_that_transformers_computes_from_the_file(
    architecture, quantization, tied, write_gguf, libraries, tmp_path
):
    file = write_gguf(architecture, quantization, tied=tied)
    config = gguf_file.convert(file, tmp_path / "out")
    assert (config.family, config.tie_embeddings) == (architecture, tied)
    assert (config.norm_eps, config.rope_theta, config.rope_scaling.factor) == (1e-5, 100_000.0, 1)
    ids_BT = np.random.default_rng(1).integers(0, config.vocab_size, (2, 20)).astype(np.int32)
    same_logits(file, tmp_path / "out", libraries, ids_BT)


@pytest.mark.parity
def test_tokenizer_and_chat_template_are_those_of_the_file(write_gguf, libraries, tmp_path, capsys):
    _, transformers, *_ = libraries
    file = write_gguf("llama", "F32")
    import_gguf.main([str(file), "--out", str(tmp_path / "out")])
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out'}: a llama model of 2 layers")
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("In the 1965 café\n", "<|im_start|>user\nthe the<|im_end|>"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == text
    assert ours.convert_ids_to_tokens(ours(" the")["input_ids"]) == ["Ġthe"]
    messages = [{"role": "user", "content": "Who?"}]
    assert ours.apply_chat_template(messages, tokenize=False) == "<|im_start|>user\nWho?<|im_end|>\n"
    assert ours.eos_token == "<|im_end|>"


def test_a_file_without_an_end_token_names_none(write_gguf, tmp_path):
    file = write_gguf("llama", "F32", end_id=None, keys={"mradermacher.quantized_by": "mradermacher"})
    config = gguf_file.convert(file, tmp_path / "out")
    assert len(PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")) == config.vocab_size, "no tokens are added"
    assert not (tmp_path / "out" / "generation_config.json").exists()
    assert "eos_token_id" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_files_that_are_missing_or_damaged_are_refused_in_one_line(tmp_path):
    pytest.importorskip("gguf")
    with pytest.raises(FileNotFoundError, match=r"no file .*nothing.gguf"):
        gguf_file.convert(tmp_path / "nothing.gguf", tmp_path / "out")
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(ValueError, match=r"damaged.gguf cannot be read as GGUF") as error:
        gguf_file.convert(damaged, tmp_path / "out")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("llama", {"without": ["blk.1.ffn_down.weight"]}, r"tensor blk\.1\.ffn_down\.weight is missing, but"),
        ("llama", {"without": ["token_embd.weight"]}, r"tensor token_embd\.weight is missing"),
        ("llama", {"extra": {"blk.0.attn_q.bias": (64,)}}, r"holds blk\.0\.attn_q\.bias, which a llama model"),
        ("llama", {"extra": {"rope_freqs.weight": (16,)}}, "holds rope_freqs.weight"),
        ("llama", {"quantization": "F64"}, r"tensor token_embd\.weight cannot be read: .* for F64 is not yet"),
        ("qwen2moe", {}, "general.architecture is 'qwen2moe', expected one of qwen2, qwen3, llama"),
        ("llama", {"keys": {"llama.expert_count": 8}}, "llama.expert_count = 8 is not supported, only 0 is"),
        ("llama", {"keys": {"llama.rope.scaling.type": "linear"}}, "rope.scaling.type = 'linear' is not supported"),
        ("llama", {"keys": {"split.count": 3}}, "is one of 3 parts: join them with llama.cpp's llama-gguf-split"),
        ("llama", {"keys": {"llama.rope.dimension_count": 16}}, "dimension_count = 16 is not supported, only 32"),
        ("llama", {"keys": {"llama.attention.sliding_window": 64}}, "sliding_window = 64 is not supported"),
        ("llama", {"keys": {"llama.attention.sinks": 4}}, "the key attention.sinks is not known"),
        ("llama", {"keys": {"tokenizer.ggml.remove_extra_whitespaces": True}}, "remove_extra_whitespaces is not known"),
        ("llama", {"keys": {"tokenizer.ggml.pre": "default"}}, "tokenizer.ggml.pre is 'default', which is not known"),
        ("llama", {"keys": NO_PREFIX}, "add_space_prefix = False is not supported, only True is"),
        ("llama", {"keys": {"llama.attention.head_count_kv": [1, 2]}}, r"head_count_kv = \[1, 2\] is not supported"),
        ("llama", {"keys": {"llama.context_length": 0}}, "llama.context_length = 0 is not supported"),
        ("llama", {"keys": {"llama.rope.freq_base": math.nan}}, "llama.rope.freq_base = nan is not supported"),
        ("llama", {"end_id": 100_000}, "eos_token 100000 is none of its 262 tokens"),
    ],
)
def test_every_key_and_tensor_is_read_or_refused_by_name(architecture, changes, message, write_gguf, tmp_path):
    """transformers fills missing tensors with random numbers and leaves others out, both without a word."""
    with pytest.raises(ValueError, match=message):
        gguf_file.convert(write_gguf(architecture, **{"quantization": "F32"} | changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()
