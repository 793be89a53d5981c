"""From logits to a token: temperature, top-k, top-p, and one draw per row with a key of its own.

Nothing here sorts: the k-th largest value and the edge of the nucleus are found by bisection over the ordered bits of
a float32, 32 passes that compare and add. A sort of 152,064 logits per token costs far more on a TPU.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from memsearcher_jax.sampling.config import SamplingConfig


def draw(logits_SV: Array, key_S: Array, settings: SamplingConfig) -> tuple[Array, Array]:
    """One token per row and its behaviour log-probability.

    The log-probability is that of the whole vocabulary at the sampling temperature, before top-k and top-p: the
    quantity that the trainer computes again (paper, section 3; the reference truncates its draws in the same way and
    evaluates both policies untruncated). Greedy draws are recorded at temperature 1.

    logits_SV: float32. key_S: typed PRNG keys, one per row. Returns token_S int32, logprob_S float32.
    """
    if settings.temperature == 0.0:
        token_S = jnp.argmax(logits_SV, axis=-1)
    else:
        logits_SV = logits_SV / settings.temperature
        kept_SV = truncate(logits_SV, settings.top_k, settings.top_p)
        noise_SV = jax.vmap(lambda key: jax.random.gumbel(key, logits_SV.shape[-1:]))(key_S)
        token_S = jnp.argmax(kept_SV + noise_SV, axis=-1)
    logprob_SV = jax.nn.log_softmax(logits_SV, axis=-1)
    logprob_S = jnp.take_along_axis(logprob_SV, token_S[:, None], axis=-1)[:, 0]
    return token_S.astype(jnp.int32), logprob_S


def truncate(logits_SV: Array, top_k: int, top_p: float) -> Array:
    """Minus infinity wherever a token is outside the top k, or outside the nucleus of the top k.

    The nucleus is the smallest set of likeliest tokens that holds at least `top_p` of the probability left after
    top-k. Tokens tied with the last one kept are kept too. top_k 0 and top_p 1 turn the rules off.
    """
    if 0 < top_k < logits_SV.shape[-1]:
        edge_S = largest_threshold(
            logits_SV.shape[0], lambda edge_S: jnp.sum(logits_SV >= edge_S[:, None], axis=-1) >= top_k
        )
        logits_SV = jnp.where(logits_SV >= edge_S[:, None], logits_SV, -jnp.inf)
    if top_p < 1.0:
        probability_SV = jax.nn.softmax(logits_SV, axis=-1)
        edge_S = largest_threshold(
            probability_SV.shape[0],
            lambda edge_S: jnp.sum(jnp.where(probability_SV >= edge_S[:, None], probability_SV, 0.0), axis=-1) >= top_p,
        )
        logits_SV = jnp.where(probability_SV >= edge_S[:, None], logits_SV, -jnp.inf)
    return logits_SV


def largest_threshold(rows: int, holds: Callable[[Array], Array]) -> Array:
    """The largest float32 threshold per row for which `holds(threshold_S) -> bool_S` is true, or minus infinity.

    `holds` must be true for all small thresholds and false for all large ones. The bits of a float32, read as an
    integer with the order of negative numbers turned round, are ordered like the floats: 32 halvings find the edge
    exactly.
    """

    def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low_S, high_S = bounds
        # The mean of two int32 without overflow.
        middle_S = (low_S >> 1) + (high_S >> 1) + (low_S & high_S & 1)
        holds_S = holds(_float_of(middle_S))
        return jnp.where(holds_S, middle_S, low_S), jnp.where(holds_S, high_S, middle_S)

    low_S = jnp.full(rows, _bits_of(jnp.float32(-jnp.inf)))
    high_S = jnp.full(rows, _bits_of(jnp.float32(jnp.inf)))
    low_S, _ = jax.lax.fori_loop(0, 32, halve, (low_S, high_S))
    return _float_of(low_S)


def _bits_of(value: Array) -> Array:
    bits = jax.lax.bitcast_convert_type(value, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _float_of(bits: Array) -> Array:
    bits = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
