"""Lossless speculation: guess the next tokens from the context's own text, verify them in one pass.

A rewritten memory copies most of the old one and pieces of what was read, so that what followed the last few tokens
the last time is a good guess of what follows them now (prompt lookup). The guess is one token per position, so the
rule that keeps the distribution is short: draw from the policy at every position, and go on as long as the draw is
the guess. A guess x is then accepted with the policy's probability p(x), and a rejected one is replaced by a draw from
p without x: speculative rejection (Leviathan et al. 2023, algorithm 1) for a proposal that puts everything on x.
Because draws are keyed by position, the tokens are even the same as without speculation.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

NGRAM = 3
"""Tokens that must repeat before what followed them is guessed."""


def propose(ids_SC: Array, length_S: Array, draft_tokens: int) -> tuple[Array, Array]:
    """(draft_SD int32, guessed_S int32): the D tokens after the latest earlier place that ends like the context.

    `guessed_S` of a row's draft mean something: none where its last NGRAM tokens stand nowhere else.
    """
    S, C = ids_SC.shape
    column_C = jnp.arange(C)
    if draft_tokens == 0:
        return jnp.zeros((S, 0), jnp.int32), jnp.zeros(S, jnp.int32)
    same_SC = jnp.ones((S, C), bool)
    for back in range(1, NGRAM + 1):
        last_S1 = jnp.take_along_axis(ids_SC, jnp.maximum(length_S[:, None] - back, 0), axis=1)
        same_SC &= jnp.roll(ids_SC, back, axis=1) == last_S1
    # Column c: the NGRAM tokens before c are the context's last ones. The context's own end is no earlier place.
    same_SC &= (column_C >= NGRAM) & (column_C < length_S[:, None])
    start_S = jnp.max(jnp.where(same_SC, column_C, 0), axis=1)
    column_SD = start_S[:, None] + jnp.arange(draft_tokens)
    guessed_S = jnp.where(start_S > 0, jnp.minimum(length_S - start_S, draft_tokens), 0)
    return jnp.take_along_axis(ids_SC, jnp.minimum(column_SD, C - 1), axis=1), guessed_S


def verified(token_ST: Array, draft_SD: Array, ends_ST: Array) -> Array:
    """taken_ST: the draws that stand, for T = D + 1: the first, and each whose predecessor is its guess and no end."""
    goes_on_SD = (token_ST[:, :-1] == draft_SD) & ~ends_ST[:, :-1]
    first_S1 = jnp.ones_like(ends_ST[:, :1])
    return jnp.concatenate([first_S1, jnp.cumprod(goes_on_SD, axis=1).astype(bool)], axis=1)
