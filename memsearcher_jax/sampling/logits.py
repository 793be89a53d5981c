"""From logits to a token: temperature, top-k, top-p, and one draw per row with a key of its own.

Nothing here sorts: the k-th largest value and the edge of the nucleus are found by bisection over the ordered bits of
a float32, 32 passes that compare and add. A sort of 152,064 logits per token costs far more on a TPU. Nor is there
noise for every logit: one uniform number per row is looked up in the running sum of the probabilities.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from memsearcher_jax.sampling.config import SamplingConfig

BLOCK = 64
"""Tokens whose probabilities are summed first: a running sum over the blocks, then one inside the block that is hit."""


def draw(logits_SV: Array, key_S: Array, settings: SamplingConfig) -> tuple[Array, Array]:
    """One token per row and its behaviour log-probability.

    The log-probability is that of the whole vocabulary at the sampling temperature, before top-k and top-p: the
    quantity that the trainer computes again (paper, section 3; the reference truncates its draws in the same way and
    evaluates both policies untruncated). Greedy draws are recorded at temperature 1. It is NaN where a logit is NaN
    or plus infinity.

    logits_SV: float32. key_S: typed PRNG keys, one per row. Returns token_S int32, logprob_S float32.
    """
    greedy = settings.temperature == 0.0
    logits_SV = logits_SV if greedy else logits_SV / settings.temperature
    top_S1 = jnp.max(logits_SV, axis=-1, keepdims=True)
    weight_SV = jnp.exp(logits_SV - top_S1)
    if greedy:
        token_S = jnp.argmax(logits_SV, axis=-1).astype(jnp.int32)
    else:
        kept_SV = truncate(logits_SV, settings.top_k, settings.top_p)
        kept_weight_SV = weight_SV if kept_SV is logits_SV else jnp.where(kept_SV > -jnp.inf, weight_SV, 0.0)
        uniform_S = jax.vmap(jax.random.uniform)(key_S)
        token_S = look_up(kept_weight_SV, uniform_S)
    chosen_S1 = jnp.take_along_axis(logits_SV, token_S[:, None], axis=-1)
    logprob_S1 = chosen_S1 - top_S1 - jnp.log(jnp.sum(weight_SV, axis=-1, keepdims=True))
    return token_S, logprob_S1[:, 0]


def look_up(weight_SV: Array, uniform_S: Array) -> Array:
    """The token at which the running sum of each row's weights passes that share of their total; int32.

    A token of weight 0 is never returned, whatever is rounded, if the row has any other. uniform_S is in [0, 1).
    """
    S, V = weight_SV.shape
    weight_SVb = jnp.pad(weight_SV, ((0, 0), (0, -V % BLOCK))).reshape(S, -1, BLOCK)
    block_SV = jnp.sum(weight_SVb, axis=-1)
    sum_SV = jnp.cumsum(block_SV, axis=-1)
    target_S = uniform_S * sum_SV[:, -1]
    block_S = _first_past(sum_SV, block_SV, target_S)
    weight_Sb = jnp.take_along_axis(weight_SVb, block_S[:, None, None], axis=1)[:, 0]
    before_S = jnp.take_along_axis(sum_SV - block_SV, block_S[:, None], axis=1)[:, 0]
    return block_S * BLOCK + _first_past(jnp.cumsum(weight_Sb, axis=-1), weight_Sb, target_S - before_S)


def _first_past(sum_SX: Array, weight_SX: Array, target_S: Array) -> Array:
    """The first entry of positive weight whose running sum exceeds the target, or the last of positive weight."""
    positive_SX = weight_SX > 0
    past_SX = positive_SX & (sum_SX > target_S[:, None])
    last_S = weight_SX.shape[1] - 1 - jnp.argmax(positive_SX[:, ::-1], axis=1)
    return jnp.where(past_SX.any(axis=1), jnp.argmax(past_SX, axis=1), last_S).astype(jnp.int32)


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
