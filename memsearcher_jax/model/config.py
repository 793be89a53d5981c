"""Settings of the model and of the device mesh. Imports no JAX, so that reading a config is fast."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from memsearcher_jax.ranges import AxisSize, Count, CountOrZero, EvenCount, Positive

Family = Literal["qwen2", "qwen3", "llama"]
"""The model_type of Hugging Face's config.json; Qwen2.5 has qwen2."""

LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)

Attention = Literal["auto", "xla", "splash"]

Remat = Literal[
    "none",
    "save_qkv_attention_gate_up",
    "save_qkv_attention_up",
    "save_qkv_attention",
    "save_attention",
    "nothing_saveable",
]
REMAT: tuple[Remat, ...] = get_args(Remat)  # by activation memory, most first


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's change of the rotary frequencies for contexts longer than `original_positions`.

    Wavelengths above original_positions / low_frequency_factor tokens grow by `factor`, those below
    original_positions / high_frequency_factor stay, and those between are interpolated.
    """

    factor: Positive = 1.0
    """Growth of the longest wavelengths; 1: no scaling."""
    low_frequency_factor: Positive = 1.0
    """Periods in original_positions tokens, below which a wavelength grows by the complete factor."""
    high_frequency_factor: Positive = 4.0
    """Periods above which a wavelength stays; more than low_frequency_factor."""
    original_positions: Count = 8_192
    """Context of the pretraining, in tokens."""


NO_SCALING = RopeScaling()


@dataclass(frozen=True)
class ModelConfig:
    """Qwen2.5, dense Qwen3 or Llama: grouped-query attention, SwiGLU, RMSNorm, rotary positions.

    Defaults: Qwen2.5-7B. Models that differ in nothing but the files they come from are equal, to share their programs.
    """

    vocab_size: Count = 152_064
    """Rows V of the embedding table; a tokenizer may use fewer."""
    embed_size: Count = 3_584
    """Width D of the residual stream."""
    ffn_size: Count = 18_944
    """Width F inside a feed-forward block."""
    layers: Count = 28
    """Transformer blocks L."""
    heads: Count = 28
    """Query heads N; a multiple of kv_heads."""
    kv_heads: Count = 4
    """Key and value heads K, each shared by heads / kv_heads query heads."""
    head_size: EvenCount = 128
    """Width H of one head; even, because rotary positions rotate pairs."""
    rope_theta: Positive = 1_000_000.0
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling = NO_SCALING
    """Scaling of the rotary frequencies, as in Llama 3.1 and later."""
    norm_eps: Positive = 1e-6
    """Added to the mean square inside RMSNorm."""
    tie_embeddings: bool = False
    """Whether the output layer shares the embedding table (Qwen2.5 up to 3B, Qwen3 up to 4B)."""
    family: Family = "qwen2"
    """qwen2 (Qwen2.5): a bias on queries, keys and values. qwen3: no bias, but RMSNorm on the query and key of each
    head. llama (Llama 2 and 3, SmolLM2): neither."""
    max_positions: Count = 32_768
    """Longest context that the model supports, in tokens."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the trained weights and of Adam's moments. Training needs float32, which bfloat16 would round away;
    evaluation may load bfloat16."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of activations, of the sampler's weights and of its KV cache."""
    attention: Attention = "auto"
    """Attention over packed rows in training: plain XLA, which materialises blocks of scores, or JAX's splash kernel,
    which auto chooses on TPUs. xla is the way on if that kernel does not compile; sampling.attention is the sampler's.
    """
    remat: Remat = "none"
    """What each layer saves for the backward pass; the rest is recomputed. none: everything is saved; nothing_saveable:
    only the layer's input; save_attention: also the attention output; save_qkv_attention: also queries, keys and
    values; save_qkv_attention_up: also the output of the up projection; save_qkv_attention_gate_up: also that of the
    gate projection."""
    path: str = field(default="", compare=False)
    """Initial weights: a Hugging Face folder, a repository of the Hub (OWNER/NAME@REVISION), a run folder, or
    package:NAME with NAME tiny, tiny_baselines, tiny_compact, tiny_memagent or tiny_memalpha, which come with this
    package; empty: random weights."""
    lora_rank: CountOrZero = 0
    """Rank of LoRA adapters: only they are trained, in float32, while the weights in `path` are frozen in
    compute_dtype; 0: all weights are trained."""
    lora_alpha: Positive = 32.0
    """The product of the adapters is scaled by lora_alpha / lora_rank."""
    lora_targets: tuple[LoraTarget, ...] = LORA_TARGETS
    """Projections that have adapters."""
    adapter: str = field(default="", compare=False)
    """Adapters for the weights in `path`: a PEFT folder, a repository of the Hub, or package:smollm2_search. With
    lora_rank they are trained further, without it they are merged into the weights; empty: none."""
    tokenizer: str = field(default="", compare=False)
    """Folder with tokenizer.json; empty: the one in `path`, or the packaged small one for random weights."""

    @property
    def compute_itemsize(self) -> int:
        """Bytes of a number in compute_dtype."""
        return 2 if self.compute_dtype == "bfloat16" else 4


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; at most one may be -1, which takes all remaining devices."""

    data: AxisSize = 1
    """Data parallelism: replicas of the weights, each trained on different rows."""
    fsdp: AxisSize = -1
    """Shards of the embed dimension of every weight; rows are split over this axis too."""
    tensor: AxisSize = 1
    """Shards of heads, ffn and vocabulary; divides model.kv_heads."""
    cpu_devices: Count = 1
    """Devices that JAX makes of a CPU. Many operations of a small model use one core only, so a device per core is
    faster. Ignored with an accelerator, and where JAX_NUM_CPU_DEVICES or XLA_FLAGS set the number."""

    def shape(self, devices: int) -> dict[str, int]:
        """The size of each axis over this many devices. Raises ValueError unless they multiply to it."""
        sizes = {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}
        text = " ".join(f"{axis}={size}" for axis, size in sizes.items())
        if any(size < 1 and size != -1 for size in sizes.values()) or list(sizes.values()).count(-1) > 1:
            raise ValueError(f"mesh {text}: every size must be 1 or more, with -1 (all remaining devices) at most once")
        known = math.prod(size for size in sizes.values() if size != -1)
        if devices % known or (-1 not in sizes.values() and devices != known):
            raise ValueError(
                f"mesh {text} does not fit {devices} devices: "
                f"the sizes must multiply to {devices}; one of them may be -1 (all remaining devices)"
            )
        return {axis: devices // known if size == -1 else size for axis, size in sizes.items()}
