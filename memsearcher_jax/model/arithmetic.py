"""What a forward pass multiplies, by formula: two operations for each weight and token, and for each pair of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from memsearcher_jax.model.config import ModelConfig


@dataclass(frozen=True)
class Work:
    """Floating-point operations of a forward pass, by part."""

    projections: float
    """To queries, keys and values."""
    attention: float
    """Scores and what they mix."""
    middle: float
    """What the heads give back to the residual stream, and into the feed-forward block."""
    last: float
    """Out of the feed-forward block: what comes of it no backward pass asks for."""
    output: float
    """The output layer."""

    @property
    def layers(self) -> float:
        return self.projections + self.attention + self.middle + self.last

    @property
    def forward(self) -> float:
        return self.layers + self.output


def forward_work(config: ModelConfig, tokens: float, pairs: float, predicted: float) -> Work:
    """Of `tokens` tokens, of which `pairs` pairs look at each other, with logits for `predicted` of them."""
    c = config
    projections = c.embed_size * c.head_size * (c.heads + 2 * c.kv_heads)
    middle = c.embed_size * c.head_size * c.heads + 2 * c.embed_size * c.ffn_size
    return Work(
        projections=2 * c.layers * projections * tokens,
        attention=4 * c.layers * c.heads * c.head_size * pairs,
        middle=2 * c.layers * middle * tokens,
        last=2 * c.layers * c.embed_size * c.ffn_size * tokens,
        output=2 * c.vocab_size * c.embed_size * predicted,
    )


def row_work(config: ModelConfig, row_tokens: int, predicted: float) -> Work:
    """Of one packed row: the kernel goes through all pairs up to the diagonal, whatever segments they are of."""
    return forward_work(config, row_tokens, row_tokens * (row_tokens + 1) / 2, predicted)


def training_flops(config: ModelConfig, work: Work) -> float:
    """Of forward, backward and what is computed again; the output layer always is."""
    again = {
        "none": 0.0,
        "projections": work.middle,
        "attention": work.middle + work.projections,
        "full": work.layers - work.last,
    }[config.remat]
    return 3 * work.forward + again + work.output
