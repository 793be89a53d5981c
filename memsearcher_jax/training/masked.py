"""Masked sums, means and loss aggregations.

Unlike `jnp.mean(..., where=mask)`, which gives NaN for an empty mask, every function here gives 0. A masked entry never
matters, even if it is inf or NaN. Masks have the shape of the values and any type: True or the number of times that an
entry counts, False or 0 where it is masked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from memsearcher_jax.training.config import Aggregate


def weighted_sum(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Weighted sum, as a scalar. Entries of weight 0 are ignored."""
    # 0 * inf is NaN: the entry must be replaced, too.
    return jnp.sum(jnp.where(weight != 0, x, 0) * weight)


def mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over the mask; 0 if the mask is empty."""
    weight = mask.astype(jnp.float32)
    return weighted_sum(x, weight) / jnp.maximum(jnp.sum(weight), 1)


def token_weights(
    mask_BT: jax.Array, aggregate: Aggregate, segment_BT: jax.Array, *, norm_tokens: int | None = None
) -> jax.Array:
    """weight_BT float32, for which `weighted_sum(x_BT, weight_BT)` is the aggregate of x_BT over the batch.

    The weights contain every divisor of the aggregate, so that the sum over micro-batches or devices equals the loss
    of the whole batch.

    `token-mean`: mean over the trained tokens.
    `seq-mean-token-sum`: mean over sequences of their token sums. A sequence without trained tokens counts as 0.
    `seq-mean-token-mean`: mean over sequences of their token means. A sequence without trained tokens does not count;
    the reference implementation divides 0 by 0 there.
    `seq-mean-token-sum-norm`: sum over all trained tokens divided by `norm_tokens` (Dr. GRPO: Liu et al. 2025, arXiv
    2503.20783, section 3.2). As in the reference implementation, it is not divided by the number of sequences.

    segment_BT: int, in 0..T. Tokens of a row with the same id above 0 form a sequence; id 0 is padding. The trained
    tokens of a sequence have the same number in mask_BT.
    Raises ValueError for an unknown aggregate, or if norm_tokens is missing where it is needed.
    """
    mask_BT = mask_BT.astype(jnp.float32)
    if aggregate == "token-mean":
        return mask_BT / jnp.maximum(mask_BT.sum(), 1)
    if aggregate == "seq-mean-token-sum":
        is_sequence_BC = _per_segment(jax.ops.segment_sum, jnp.ones_like(mask_BT), segment_BT)[:, 1:] > 0
        count_BC = jnp.maximum(_per_segment(jax.ops.segment_max, mask_BT, segment_BT)[:, 1:], is_sequence_BC)
        return mask_BT / jnp.maximum(count_BC.sum(), 1)
    if aggregate == "seq-mean-token-sum-norm":
        if norm_tokens is None:
            raise ValueError("aggregate seq-mean-token-sum-norm needs norm_tokens")
        return mask_BT / norm_tokens
    if aggregate == "seq-mean-token-mean":
        trained_BC = _per_segment(jax.ops.segment_sum, (mask_BT != 0).astype(jnp.float32), segment_BT)
        count_BC = jnp.maximum(_per_segment(jax.ops.segment_max, mask_BT, segment_BT)[:, 1:], 0)
        tokens_BT = jnp.take_along_axis(trained_BC, segment_BT, axis=1)
        return mask_BT / jnp.maximum(tokens_BT, 1) / jnp.maximum(count_BC.sum(), 1)
    raise ValueError(f"unknown aggregate {aggregate!r}: choose one of {', '.join(Aggregate.__args__)}")


def _per_segment(reduce: Callable[..., jax.Array], x_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """Sum or maximum of x over each segment, [B, C]: indexed by segment id, with C = T + 1."""
    return jax.vmap(partial(reduce, num_segments=x_BT.shape[1] + 1))(x_BT, segment_BT)
