"""Settings of the sampler. No JAX here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingConfig:
    """How contexts are held and how tokens are drawn. Defaults: the reference's training rollouts."""

    slots: int = 64
    """Contexts that decode side by side, over all devices of a host."""
    tensor: int = 1
    """Devices that share one copy of the sampler's weights; divides a host's devices."""
    context_tokens: int = 8_192
    """Room of one slot, prompt and generations together."""
    decode_tokens: int = 32
    """Most tokens that one call to the device decodes before the host looks at what ended."""
    prefill_rows: int = 8
    """Slots that one prefill call works on."""
    prefill_buckets: tuple[int, ...] = (64, 256, 1024)
    """Widths that prefill is compiled for, ascending; longer text goes through in several calls."""
    temperature: float = 1.0
    """Of training's rollouts, above 0; evaluation has its own, where 0 is greedy."""
    top_k: int = 10_000
    """Draw among this many likeliest tokens; 0 turns it off."""
    top_p: float = 0.99
    """Draw among the likeliest tokens that hold this much probability; 1 turns it off."""
