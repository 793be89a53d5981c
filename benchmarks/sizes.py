"""Models to measure with: random weights of several sizes, and their twins in transformers."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax
from jax.sharding import Mesh

from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.model.config import MeshConfig, ModelConfig

PRESETS = Path(__file__).resolve().parents[1] / "configs"
Size = Literal["tiny", "small", "qwen05b", "qwen3b", "qwen7b"]
OWN = {
    "tiny": ModelConfig(2_048, embed_size=64, ffn_size=192, layers=2, heads=4, kv_heads=2, head_size=16, tied=True),
    "small": ModelConfig(8_192, embed_size=256, ffn_size=768, layers=4, heads=8, kv_heads=2, head_size=32, tied=True),
}


def model_of(size: Size, dtype: str) -> ModelConfig:
    """The shape of that size, with weights, activations and cache of one type."""
    model = OWN.get(size) or runpy.run_path(str(PRESETS / f"{size}.py"))[size]().model
    return replace(model, param_dtype=dtype, compute_dtype=dtype, remat="none")


def mesh_of(tensor: int) -> Mesh:
    """All devices, so many of them to one copy of the weights."""
    return sharding.make_mesh(MeshConfig(data=-1, fsdp=1, tensor=tensor))


def random_params(model: ModelConfig, mesh: Mesh) -> dict:
    """Random weights where they belong."""
    init = jax.jit(lambda key: qwen.init(key, model), out_shardings=sharding.param_shardings(model, mesh))
    return jax.block_until_ready(init(jax.random.key(0)))


def transformers_twin(model: ModelConfig):
    """The same architecture with random weights, as transformers generates with it. Needs the extra `parity`."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=model.vocab_size,
        hidden_size=model.embed_size,
        intermediate_size=model.ffn_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        max_position_embeddings=model.max_positions,
        rope_theta=model.rope_theta,
        tie_word_embeddings=model.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).to(getattr(torch, model.param_dtype)).eval()
