"""From logits to a token: temperature, top-k, top-p, and one draw per row with its own key.

Nothing here sorts: the k-th largest value and the edge of the nucleus are found by bisection over the ordered bits of
a float32, 32 passes that compare and add. A sort of 152,064 logits per token costs far more on a TPU. Nor is noise
drawn for every logit: one uniform number per row is located in the cumulative sum of the probabilities.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from memsearcher_jax.model.config import Attention
from memsearcher_jax.ops.axes import constrain, platform, shard_count, shard_map_per_device
from memsearcher_jax.sampling import draw_kernel
from memsearcher_jax.sampling.draw_kernel import largest_threshold

BLOCK = 64
"""Tokens summed together first: one cumulative sum runs over the blocks, a second one inside the selected block."""


def sample(
    logits_SV: Array,
    uniform_S: Array,
    temperature_S: Array,
    top_k_S: Array,
    top_p_S: Array,
    *,
    attention: Attention = "auto",
) -> tuple[Array, Array]:
    """One token per row and its behaviour log-probability.

    The log-probability is taken over the whole vocabulary at the sampling temperature, before top-k and top-p: the
    quantity that the trainer computes again (paper, section 3; the reference truncates its draws in the same way and
    evaluates both policies untruncated). Temperature 0 is greedy; such draws are recorded at temperature 1. It is NaN
    where a logit is NaN or plus infinity.

    logits_SV: float32. uniform_S: random numbers in [0, 1). Rules as in `SamplingConfig`, one per row. On a mesh the
    devices that share the vocabulary exchange logits once, so that each draws for whole rows. Returns token_S int32
    and logprob_S float32. `attention`: "xla" draws without the kernel of TPUs.
    """
    S, V = logits_SV.shape
    # The shards of the vocabulary stay apart: the devices would write the exchanged logits once more to join them.
    X = shard_count("vocab") if V % shard_count("vocab") == 0 else 1
    rows = ("draws",)
    # Without the constraint whatever these are computed from would be split in the same way.
    per_row = [constrain(x_S, ("batch",)) for x_S in (uniform_S, temperature_S, top_k_S, top_p_S)]
    in_axes = (("draws", None, None), *[rows] * 4)
    draw = shard_map_per_device(partial(_draw, attention), in_axes, (rows,) * 2, ((S,),) * 2)
    logits_SXV = constrain(logits_SV.reshape(S, X, V // X), ("batch", "vocab", None))
    token_S, logprob_S = draw(logits_SXV, *per_row)
    return constrain(token_S, ("batch",)), constrain(logprob_S, ("batch",))


def _draw(attention: Attention, logits_SXV: Array, *per_row: Any) -> tuple[Array, Array]:
    if platform() == "tpu" and attention != "xla":
        return draw_kernel.draw(jnp.swapaxes(logits_SXV, 0, 1), *per_row)
    return draw(logits_SXV.reshape(len(logits_SXV), -1), *per_row)


def draw(
    logits_SV: Array, uniform_S: Array, temperature_S: Array, top_k_S: Array, top_p_S: Array
) -> tuple[Array, Array]:
    """`sample` on one device."""
    is_greedy_S = temperature_S == 0.0
    logits_SV = logits_SV / jnp.where(is_greedy_S, 1.0, temperature_S)[:, None]
    max_S1 = jnp.max(logits_SV, axis=-1, keepdims=True)
    weight_SV = jnp.exp(logits_SV - max_S1)
    sum_S = jnp.sum(weight_SV, axis=-1)

    def truncated() -> Array:
        return jnp.where(truncate(logits_SV, top_k_S, top_p_S) > -jnp.inf, weight_SV, 0.0)

    # A pass over the logits costs as much as a layer of a small model: only the rules that some row has are computed.
    truncates_S = ~is_greedy_S & ((top_k_S > 0) & (top_k_S < logits_SV.shape[-1]) | (top_p_S < 1.0))
    kept_SV = jax.lax.cond(jnp.any(truncates_S), truncated, lambda: weight_SV)
    drawn_S = inverse_cdf(kept_SV, uniform_S)
    token_S = jax.lax.cond(
        jnp.any(is_greedy_S), lambda: jnp.where(is_greedy_S, _first(logits_SV == max_S1), drawn_S), lambda: drawn_S
    )
    token_logit_S1 = jnp.take_along_axis(logits_SV, token_S[:, None], axis=-1)
    logprob_S1 = token_logit_S1 - max_S1 - jnp.log(sum_S)[:, None]
    return token_S, logprob_S1[:, 0]


def inverse_cdf(weight_SV: Array, uniform_S: Array) -> Array:
    """The token (int32) at which the cumulative sum of each row's weights exceeds `uniform_S` of their total.

    Whatever is rounded, a token of weight 0 is returned only if the whole row is 0. uniform_S is in [0, 1).
    """
    S, V = weight_SV.shape
    weight_SXW = jnp.pad(weight_SV, ((0, 0), (0, -V % BLOCK))).reshape(S, -1, BLOCK)
    block_sum_SX = jnp.sum(weight_SXW, axis=-1)
    cumulative_SX = jnp.cumsum(block_sum_SX, axis=-1)
    target_S = uniform_S * cumulative_SX[:, -1]
    block_S = _first_above(cumulative_SX, block_sum_SX, target_S)
    weight_SW = jnp.take_along_axis(weight_SXW, block_S[:, None, None], axis=1)[:, 0]
    before_S = jnp.take_along_axis(cumulative_SX - block_sum_SX, block_S[:, None], axis=1)[:, 0]
    return block_S * BLOCK + _first_above(jnp.cumsum(weight_SW, axis=-1), weight_SW, target_S - before_S)


def _first_above(cumulative_SX: Array, weight_SX: Array, target_S: Array) -> Array:
    """The first entry of positive weight whose cumulative sum exceeds the target, or the last of positive weight."""
    is_positive_SX = weight_SX > 0
    is_above_SX = is_positive_SX & (cumulative_SX > target_S[:, None])
    last_S = weight_SX.shape[1] - 1 - _first(is_positive_SX[:, ::-1])
    return jnp.where(is_above_SX.any(axis=1), _first(is_above_SX), last_S)


def _first(is_true_SV: Array) -> Array:
    """The first true entry of each row, or the last entry. XLA's argmax on a CPU takes eight times as long."""
    V = is_true_SV.shape[1]
    return jnp.min(jnp.where(is_true_SV, jnp.arange(V, dtype=jnp.int32), V - 1), axis=1)


def truncate(logits_SV: Array, top_k_S: Array, top_p_S: Array) -> Array:
    """Minus infinity wherever a token is outside its row's top k, or outside the nucleus of the top k.

    The nucleus is the smallest set of most likely tokens that holds at least `top_p` of the probability left after
    top-k. Tokens tied with the last one kept are kept too. top_k 0 and top_p 1 disable the rules.
    """

    def at_least(value_SV: Array, threshold_S: Array) -> Array:
        return value_SV >= threshold_S[:, None]

    def holds_k(threshold_S: Array) -> Array:
        return jnp.sum(at_least(logits_SV, threshold_S), axis=-1) >= top_k_S

    threshold_S = largest_threshold((top_k_S > 0) & (top_k_S < logits_SV.shape[-1]), holds_k)
    logits_SV = jnp.where(at_least(logits_SV, threshold_S), logits_SV, -jnp.inf)
    probability_SV = jax.nn.softmax(logits_SV, axis=-1)

    def holds_nucleus(threshold_S: Array) -> Array:
        kept_SV = jnp.where(at_least(probability_SV, threshold_S), probability_SV, 0.0)
        return jnp.sum(kept_SV, axis=-1) >= top_p_S

    threshold_S = largest_threshold(top_p_S < 1.0, holds_nucleus)
    return jnp.where(at_least(probability_SV, threshold_S), logits_SV, -jnp.inf)
