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
    apart: bool = False
    """An engine of its own for each copy of the weights on a host: none waits for another, as they do in one program
    for all, but each compiles its own. It pays on a CPU that is cut into several devices (JAX_NUM_CPU_DEVICES)."""
    context_tokens: int = 8_192
    """Room of one slot, prompt and generations together."""
    decode_tokens: int = 32
    """Most tokens that one call to the device decodes before the host looks at what ended."""
    decode_rows: tuple[int, ...] = ()
    """Where fewer slots speak than there are, decode for this many, on each copy of the weights: what is compiled
    beside the program for all slots, ascending. It pays where decoding takes arithmetic, as on a CPU. A number that is
    not below the slots of a copy is left out."""
    rows_per_call: int = 8
    """Slots that one call opens, extends or copies; for copies on each copy of the weights."""
    prefill_piece: int = 64
    """Tokens of one context that prefill takes together; a context's last piece is padded."""
    prefill_buckets: tuple[int, ...] = (256, 1024)
    """Tokens of a prefill call, of several contexts and for each copy of the weights: what is compiled, ascending."""
    draft_tokens: int = 0
    """Tokens that are guessed from the context's own text and verified in one pass; 0 decodes one by one."""
    temperature: float = 1.0
    """Of training's rollouts, above 0; evaluation has its own, where 0 is greedy."""
    top_k: int = 10_000
    """Draw among this many likeliest tokens; 0 turns it off."""
    top_p: float = 0.99
    """Draw among the likeliest tokens that hold this much probability; 1 turns it off."""

    def prefill_bucket(self, tokens: int) -> int:
        """The bucket for so many tokens: the narrowest that holds them, if they fill half of it.

        Else the one below it, which they fill whole; the rest comes after.
        """
        width = next((width for width in self.prefill_buckets if width >= tokens), self.prefill_buckets[-1])
        filled = [bucket for bucket in self.prefill_buckets if bucket <= tokens]
        return filled[-1] if filled and tokens < width / 2 else width
