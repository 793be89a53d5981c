"""FLOPs of a forward pass and of training, by formula: two per weight and token, two per product in attention."""

from __future__ import annotations

from typing import NamedTuple

from memsearcher_jax.model.config import ModelConfig


class ForwardFlops(NamedTuple):
    """Floating-point operations of a forward pass, by matrix products."""

    qkv: float
    attention: float  # scores, and the values weighted by them
    out_gate_up: float  # the attention's output projection, and the feed-forward block's gate and up projections
    down: float  # the feed-forward block's down projection, whose result no backward pass needs
    output: float  # the output layer

    @property
    def forward(self) -> float:
        return sum(self)


def forward_flops(config: ModelConfig, tokens: float, pairs: float, predicted: float) -> ForwardFlops:
    """FLOPs of `tokens` tokens with `pairs` (query, key) pairs in attention; `predicted`: tokens with logits."""
    c = config
    qkv = c.embed_size * c.head_size * (c.heads + 2 * c.kv_heads)
    out_gate_up = c.embed_size * c.head_size * c.heads + 2 * c.embed_size * c.ffn_size
    return ForwardFlops(
        qkv=2 * c.layers * qkv * tokens,
        attention=4 * c.layers * c.heads * c.head_size * pairs,
        out_gate_up=2 * c.layers * out_gate_up * tokens,
        down=2 * c.layers * c.embed_size * c.ffn_size * tokens,
        output=2 * c.vocab_size * c.embed_size * predicted,
    )


def training_flops(config: ModelConfig, flops: ForwardFlops) -> float:
    """FLOPs of the forward pass, the backward pass and what remat recomputes; the output layer is always recomputed.

    With LoRA the projections and the output layer have no gradient; what their adapters compute is not counted.
    """
    weight_gradients = 0 if config.lora_rank else flops.forward - flops.attention
    recomputed = {
        "none": 0.0,
        "save_qkv_attention_gate_up": flops.out_gate_up - 2 * flops.down,  # gate, up and down have equal shapes
        "save_qkv_attention_up": flops.out_gate_up - flops.down,
        "save_qkv_attention": flops.out_gate_up,
        "save_attention": flops.out_gate_up + flops.qkv,
        "nothing_saveable": flops.qkv + flops.attention + flops.out_gate_up,
    }[config.remat]
    return 2 * flops.forward + flops.attention + weight_gradients + recomputed + flops.output
