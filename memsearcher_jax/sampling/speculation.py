"""Lossless speculative decoding by prompt lookup: draft tokens from the context itself, verify them in one pass.

A rewritten memory copies most of the previous one and parts of the retrieved passages, so what followed the last few
tokens at their previous occurrence is a good draft of what follows them now. The proposal distribution is a point mass,
which makes the rule that keeps the policy's distribution short: draw from the policy at every position and accept draws
for as long as each equals its draft token. A draft token x is then accepted with the policy's probability p(x), and a
rejected one is replaced by a draw from p without x: speculative sampling (Leviathan et al. 2023, algorithm 1).
Because draws are keyed by position, the tokens are even the same as without speculation.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

NGRAM = 3
"""Tokens that must have occurred before for their continuation to be drafted."""


def propose(ids_SC: Array | None, length_S: Array, draft_tokens: int) -> tuple[Array, Array]:
    """(draft_SW int32, drafted_S int32): the tokens after the previous occurrence of the context's last NGRAM tokens.

    Only the first `drafted_S` of the W = `draft_tokens` columns are drafts: none where there is no such occurrence.
    `ids_SC` is None where nothing is to be drafted.
    """
    if ids_SC is None:
        return jnp.zeros((*length_S.shape, 0), jnp.int32), jnp.zeros_like(length_S)
    S, C = ids_SC.shape
    column_C = jnp.arange(C)
    is_match_SC = jnp.ones((S, C), bool)
    for back in range(1, NGRAM + 1):
        last_S1 = jnp.take_along_axis(ids_SC, jnp.maximum(length_S[:, None] - back, 0), axis=1)
        is_match_SC &= jnp.roll(ids_SC, back, axis=1) == last_S1
    # Column c: the NGRAM tokens before c equal the context's last ones. The context's end does not match itself.
    is_match_SC &= (column_C >= NGRAM) & (column_C < length_S[:, None])
    start_S = jnp.max(jnp.where(is_match_SC, column_C, 0), axis=1)
    column_SW = start_S[:, None] + jnp.arange(draft_tokens)
    drafted_S = jnp.where(start_S > 0, jnp.minimum(length_S - start_S, draft_tokens), 0)
    return jnp.take_along_axis(ids_SC, jnp.minimum(column_SW, C - 1), axis=1), drafted_S


def accepted(token_ST: Array, draft_SW: Array, ends_ST: Array) -> Array:
    """accepted_ST, for T = W + 1: the first draw, and each after a draw that equals its draft and ends nothing."""
    continues_SW = (token_ST[:, :-1] == draft_SW) & ~ends_ST[:, :-1]
    first_S1 = jnp.ones_like(ends_ST[:, :1])
    return jnp.concatenate([first_S1, jnp.cumprod(continues_SW, axis=1).astype(bool)], axis=1)
