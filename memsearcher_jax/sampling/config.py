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
    """Slots that one prefill call of the narrowest bucket works on; wider buckets take fewer, down to one."""
    prefill_buckets: tuple[int, ...] = (64, 256, 1024)
    """Widths that prefill is compiled for, ascending; longer text goes through in several calls."""
    cache_buckets: tuple[int, ...] = (1024, 2048, 3072, 4096, 6144)
    """Lengths of cache, ascending, that attention is compiled for beside the whole: cost follows the live length."""
    draft_tokens: int = 0
    """Tokens that are guessed from the context's own text and verified in one pass; 0 decodes one by one."""
    temperature: float = 1.0
    """Of training's rollouts, above 0; evaluation has its own, where 0 is greedy."""
    top_k: int = 10_000
    """Draw among this many likeliest tokens; 0 turns it off."""
    top_p: float = 0.99
    """Draw among the likeliest tokens that hold this much probability; 1 turns it off."""

    @property
    def windows(self) -> tuple[int, ...]:
        """The lengths of cache in use: the buckets below `context_tokens`, and `context_tokens`."""
        return (*(bucket for bucket in self.cache_buckets if bucket < self.context_tokens), self.context_tokens)

    def window(self, tokens: int) -> int:
        """The shortest of them that holds so many tokens."""
        return next(window for window in self.windows if window >= tokens)

    def prefill_width(self, tokens: int) -> int:
        """The bucket for so many tokens: the narrowest that holds them, if they fill half of it.

        Else the one below it, which they fill whole; the rest comes after.
        """
        width = next((width for width in self.prefill_buckets if width >= tokens), self.prefill_buckets[-1])
        filled = [bucket for bucket in self.prefill_buckets if bucket <= tokens]
        return filled[-1] if filled and tokens < width / 2 else width

    def rows_at(self, width: int) -> int:
        """Slots that one prefill call of this bucket works on: about as many tokens in all as in the narrowest."""
        return max(1, self.prefill_rows * self.prefill_buckets[0] // width)
