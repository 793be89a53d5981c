"""The shape of a Qwen2.5 or Qwen3 model and where its weights are. No JAX here, so that reading a config is quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["qwen2", "qwen3"]
"""By the model_type of Hugging Face's config.json; Qwen2.5 is a qwen2."""


@dataclass(frozen=True)
class ModelConfig:
    """Qwen2.5 or dense Qwen3: grouped heads; SwiGLU; RMSNorm; rotary positions. Defaults: the shape of Qwen2.5-7B."""

    vocab_size: int = 152_064
    """Rows V of the embedding table; a tokenizer may use fewer."""
    embed_size: int = 3_584
    """Width D of the residual stream."""
    ffn_size: int = 18_944
    """Width F inside a feed-forward block."""
    layers: int = 28
    """Transformer blocks L."""
    heads: int = 28
    """Query heads N; a multiple of kv_heads."""
    kv_heads: int = 4
    """Key and value heads K, each shared by heads / kv_heads query heads."""
    head_size: int = 128
    """Width H of one head; even, because rotary positions turn pairs."""
    rope_theta: float = 1_000_000.0
    """Base of the rotary wavelengths."""
    norm_eps: float = 1e-6
    """Added to the mean square inside RMSNorm."""
    tied: bool = False
    """Whether the output layer is the embedding table (Qwen2.5 up to 3B, Qwen3 up to 4B) or a weight of its own."""
    family: Family = "qwen2"
    """What shapes queries, keys and values: a bias on each (qwen2, which is Qwen2.5), or RMSNorm on the query and the
    key of each head and no bias (qwen3)."""
    max_positions: int = 32_768
    """Longest context that the model was made for, in tokens."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the trained weights and of Adam's moments."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of activations, of the sampler's weights and of its cache."""
    attention: Literal["auto", "xla", "splash"] = "auto"
    """How packed rows are trained on: plain XLA, which keeps [T, T] scores, or the splash kernel of the TPU; auto takes
    the kernel where the mesh is of TPUs."""
    remat: Literal["none", "projections", "attention", "full"] = "none"
    """What the backward pass keeps of each layer: everything (none), its input (full), and beside that what attention
    gave (attention), or that and the queries, keys and values (projections). The rest is computed again."""
    path: str = ""
    """A Hugging Face folder with the starting weights, or package:tiny, which comes with this package; empty: random
    weights."""
    tokenizer: str = ""
    """A folder with tokenizer.json; empty: the one in `path`, or the packaged small one for random weights."""


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; -1 takes what the others leave (in one place at most)."""

    data: int = 1
    """Copies of the weights; each device of this axis trains on rows of its own."""
    fsdp: int = -1
    """Parts that the embed dimension of every weight is cut into; rows are spread over this axis too."""
    tensor: int = 1
    """Parts that heads, ffn and vocabulary are cut into; divides model.kv_heads."""
