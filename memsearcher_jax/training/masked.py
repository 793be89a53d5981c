"""The one home of masked sums, means and aggregations.

One rule for all of them: a masked entry never matters, not even when it is inf or NaN, and the mean of nothing is 0.
Masks are bool or 0/1 of any type, with the shape of the values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from memsearcher_jax.training.config import Aggregate


def total(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Weighted sum, as a scalar; entries of weight 0 do not count, whatever they hold."""
    # 0 * inf is NaN, so the entry itself must go, not only its weight.
    return jnp.sum(jnp.where(weight != 0, x, 0) * weight)


def mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over the mask; 0 where the mask is empty."""
    return total(x, mask.astype(jnp.float32)) / jnp.maximum(jnp.sum(mask != 0), 1)


def std(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Standard deviation (of the whole population) over the mask; 0 where the mask is empty."""
    return jnp.sqrt(mean(jnp.square(x - mean(x, mask)), mask))


def largest(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Maximum of non-negative values over the mask; 0 where the mask is empty."""
    return jnp.max(jnp.where(mask != 0, x, 0), initial=0)


def segment_means(x_BT: jax.Array, mask_BT: jax.Array, segment_BT: jax.Array | None = None) -> jax.Array:
    """mean_BT: at every token the mean of x over the mask within its segment; 0 where that is empty.

    segment_BT as in `token_weights`.
    """
    segment_BT = _one_segment(mask_BT) if segment_BT is None else segment_BT
    total_BC = _sum_per_segment(jnp.where(mask_BT != 0, x_BT, 0), segment_BT)
    count_BC = _sum_per_segment((mask_BT != 0).astype(jnp.float32), segment_BT)
    return jnp.take_along_axis(total_BC / jnp.maximum(count_BC, 1), segment_BT, axis=1)


def token_weights(
    mask_BT: jax.Array,
    aggregate: Aggregate,
    segment_BT: jax.Array | None = None,
    *,
    norm_tokens: int | None = None,
) -> jax.Array:
    """The weight_BT float32 with which `total(x_BT, weight_BT)` is the aggregate of x_BT over the batch.

    All that an aggregation divides by is in these weights. So a batch may be cut into micro-batches or spread over
    devices, and the sum of the parts' totals is the loss of the whole.

    `token-mean`: every trained token counts the same.
    `seq-mean-token-sum`: the mean over sequences of each one's sum. One without trained tokens counts, with sum 0.
    `seq-mean-token-mean`: the mean over sequences of each one's mean. One without trained tokens has no mean and does
    not count; the reference divides 0 by 0 there.
    `seq-mean-token-sum-norm`: the mean over sequences of each one's sum over the constant `norm_tokens`, so that a
    token counts the same in a short and a long one (Dr. GRPO: Liu et al. 2025, arXiv 2503.20783, section 3.2).

    segment_BT: int, in 0..T. Tokens of one row that share an id above 0 are a sequence; id 0 is padding.
    None: each row is a sequence.
    Raises ValueError for an unknown aggregate, and without the constant of the one that needs it.
    """
    mask_BT = (mask_BT != 0).astype(jnp.float32)
    if aggregate == "token-mean":
        return mask_BT / jnp.maximum(mask_BT.sum(), 1)

    segment_BT = _one_segment(mask_BT) if segment_BT is None else segment_BT
    is_sequence_BC = _sum_per_segment(jnp.ones_like(mask_BT), segment_BT)[:, 1:] > 0
    if aggregate == "seq-mean-token-sum":
        return mask_BT / jnp.maximum(is_sequence_BC.sum(), 1)
    if aggregate == "seq-mean-token-sum-norm":
        if norm_tokens is None:
            raise ValueError("seq-mean-token-sum-norm divides by a constant: give norm_tokens")
        return mask_BT / jnp.maximum(is_sequence_BC.sum(), 1) / norm_tokens
    if aggregate == "seq-mean-token-mean":
        trained_BC = _sum_per_segment(mask_BT, segment_BT)
        tokens_BT = jnp.take_along_axis(trained_BC, segment_BT, axis=1)
        return mask_BT / jnp.maximum(tokens_BT, 1) / jnp.maximum((trained_BC[:, 1:] > 0).sum(), 1)
    raise ValueError(f"no aggregate {aggregate!r}: choose one of {', '.join(Aggregate.__args__)}")


def _one_segment(mask_BT: jax.Array) -> jax.Array:
    return jnp.ones(mask_BT.shape, jnp.int32)


def _sum_per_segment(x_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """Sum of x over each segment: [B, T + 1], indexed by segment id."""
    bins = x_BT.shape[1] + 1
    return jax.vmap(lambda x_T, segment_T: jax.ops.segment_sum(x_T, segment_T, num_segments=bins))(x_BT, segment_BT)
