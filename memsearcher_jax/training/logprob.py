"""Log-probabilities and entropies of packed rows, without ever holding [T, V] logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from memsearcher_jax.model import qwen
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.training.parts import filled_parts, merge_rows, scan_leading, split_rows
from memsearcher_jax.training.rows import Rows


def token_logprobs(
    params: dict, model_config: ModelConfig, rows: Rows, *, chunk: int, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """(logprob_BT, entropy_BT), float32: of each trained token given those before it in its segment; 0 elsewhere.

    Logits are divided by `temperature`, as they were when the tokens were drawn. Entry t of both belongs to ids[t].
    Logits exist for `chunk` tokens of each row at a time, in the backward pass too, which computes them again, and for
    what is not trained not at all: of a context that mostly reads, that is most.
    """
    hidden_BTD, _ = qwen.forward(params, model_config, rows.ids_BT, rows.position_BT, rows.segment_BT, output="hidden")
    # Position t predicts t + 1. The last one of a row predicts nothing; its score falls off in the shift back.
    target_BT, counts_BT = jnp.roll(rows.ids_BT, -1, axis=1), jnp.roll(rows.mask_BT, -1, axis=1).at[:, -1].set(False)
    # What counts comes first in every row, so that whole chunks are left over.
    order_BT = jnp.argsort(~counts_BT, axis=1, stable=True)
    hidden_BTD = jnp.take_along_axis(hidden_BTD, order_BT[..., None], axis=1)
    target_BT, counts_BT = (jnp.take_along_axis(x_BT, order_BT, axis=1) for x_BT in (target_BT, counts_BT))
    # Inside a scan nothing can merge the recomputation with the first pass, so the guard against it is waste.
    score = jax.checkpoint(partial(_score, model_config, temperature), prevent_cse=False)

    def step(_: None, chunk_in: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        hidden_BcD, target_Bc, counts_Bc = chunk_in
        nothing_Bc = jnp.zeros(target_Bc.shape, jnp.float32)
        scores = jax.lax.cond(
            jnp.any(counts_Bc), lambda: score(params, hidden_BcD, target_Bc), lambda: (nothing_Bc, nothing_Bc)
        )
        return None, tuple(jnp.where(counts_Bc, x_Bc, 0) for x_Bc in scores)

    _, scores = jax.lax.scan(step, None, tuple(_to_chunks(x, chunk) for x in (hidden_BTD, target_BT, counts_BT)))
    rank_BT = jnp.argsort(order_BT, axis=1)
    logprob_BT, entropy_BT = (jnp.take_along_axis(_from_chunks(x), rank_BT, axis=1) for x in scores)
    return jnp.roll(logprob_BT, 1, axis=1), jnp.roll(entropy_BT, 1, axis=1)


def make_reference(
    model_config: ModelConfig, *, chunk: int, temperature: float, rows_at_once: int
) -> Callable[[dict, Rows], jax.Array]:
    """A compiled `(params, rows) -> logprob_BT` for frozen weights; `rows_at_once` divides the number of rows.

    Of rows that lie as `rows.pack` puts them, those that are empty cost nothing.
    """

    @jax.jit
    def reference(params: dict, rows: Rows) -> jax.Array:
        def score(carry: None, part: Rows) -> tuple[None, jax.Array]:
            return carry, token_logprobs(params, model_config, part, chunk=chunk, temperature=temperature)[0]

        parts = split_rows(rows, len(rows.ids_BT) // rows_at_once)
        return merge_rows(scan_leading(score, None, parts, filled_parts(parts.segment_BT))[1])

    return reference


def _score(
    model_config: ModelConfig, temperature: float, params: dict, hidden_BcD: jax.Array, target_Bc: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of the target and entropy of the prediction, for one chunk of every row."""
    logits_BcV = qwen.logits(params, model_config, hidden_BcD) / temperature
    log_total_Bc = jax.nn.logsumexp(logits_BcV, axis=-1)
    # A masked sum, not a gather: it stays on the devices that share the vocabulary, and its gradient is no scatter.
    is_target_BcV = jnp.arange(logits_BcV.shape[-1]) == target_Bc[..., None]
    logprob_Bc = jnp.sum(jnp.where(is_target_BcV, logits_BcV, 0), axis=-1) - log_total_Bc
    probability_BcV = jnp.exp(logits_BcV - log_total_Bc[..., None])
    return logprob_Bc, log_total_Bc - jnp.sum(probability_BcV * logits_BcV, axis=-1)


def _to_chunks(x_BT: jax.Array, chunk: int) -> jax.Array:
    """[B, T, ...] as [T / chunk, B, chunk, ...]."""
    return x_BT.reshape(x_BT.shape[0], -1, chunk, *x_BT.shape[2:]).swapaxes(0, 1)


def _from_chunks(x_nBc: jax.Array) -> jax.Array:
    """[T / chunk, B, chunk] as [B, T]."""
    return x_nBc.swapaxes(0, 1).reshape(x_nBc.shape[1], -1)
