"""Log-probabilities and entropies of packed rows, without ever holding [T, V] logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from memsearcher_jax.model import qwen
from memsearcher_jax.model.axes import by_rows, most
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
    table_VD, hidden_BTD = qwen.output_layer(params, model_config, hidden_BTD)
    scores = _scores(chunk, temperature, table_VD, hidden_BTD, target_BT, counts_BT)
    logprob_BT, entropy_BT = (jnp.roll(x_BT, 1, axis=1) for x_BT in scores)
    return logprob_BT, entropy_BT


def make_reference(
    model_config: ModelConfig, *, chunk: int, temperature: float, rows_at_once: int
) -> Callable[[dict, Rows], jax.Array]:
    """A compiled `(params, rows) -> logprob_BT` for frozen weights; `rows_at_once` divides the number of rows.

    Of rows that lie as `rows.pack` puts them, those that are empty cost nothing.
    """

    @jax.jit
    def reference(params: dict, rows: Rows) -> jax.Array:
        count = len(rows.ids_BT) // rows_at_once

        def score_here(params: dict, rows: Rows) -> jax.Array:
            def score(carry: None, part: Rows) -> tuple[None, jax.Array]:
                return carry, token_logprobs(params, model_config, part, chunk=chunk, temperature=temperature)[0]

            parts = split_rows(rows, count)
            return merge_rows(scan_leading(score, None, parts, filled_parts(parts.segment_BT))[1])

        axes_BT = ("batch", None)
        return by_rows(score_here, (qwen.weight_axes(model_config), axes_BT), axes_BT)(params, rows)

    return reference


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scores(
    chunk: int,
    temperature: float,
    table_VD: jax.Array,
    hidden_BTD: jax.Array,
    target_BT: jax.Array,
    counts_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(logprob_BT of the targets, entropy_BT of the predictions) where `counts_BT`; 0 elsewhere.

    Its derivative is written out. Left to JAX, a loop must have a fixed number of chunks, and a choice to skip one
    keeps for each what the branch was given: the table.
    """
    front = _front(counts_BT, chunk)
    hidden_BTD, target_BT = front.bring(hidden_BTD), front.bring(target_BT)

    def score(index: jax.Array, scores: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden_BcD, target_Bc = (_cut(x, index, chunk) for x in (hidden_BTD, target_BT))
        logits_BcV, log_total_Bc, is_target_BcV = _predict(temperature, table_VD, hidden_BcD, target_Bc)
        logprob_Bc = jnp.sum(jnp.where(is_target_BcV, logits_BcV, 0), axis=-1) - log_total_Bc
        probability_BcV = jnp.exp(logits_BcV - log_total_Bc[..., None])
        entropy_Bc = log_total_Bc - jnp.sum(probability_BcV * logits_BcV, axis=-1)
        return tuple(_put(x, new, index) for x, new in zip(scores, (logprob_Bc, entropy_Bc), strict=True))

    nothing_BT = jnp.zeros(target_BT.shape, jnp.float32)
    scores = jax.lax.fori_loop(0, front.chunks, score, (nothing_BT, nothing_BT))
    return tuple(front.back(x_BT) for x_BT in scores)


def _scores_forward(chunk: int, temperature: float, *arguments: jax.Array):
    return _scores(chunk, temperature, *arguments), arguments


def _scores_backward(
    chunk: int, temperature: float, arguments: tuple[jax.Array, ...], gradient: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    """With p the softmax of logits l, and H its entropy: d logprob / dl = [target] - p, dH / dl = -p (l - sum(p l))."""
    table_VD, hidden_BTD, target_BT, counts_BT = arguments
    front = _front(counts_BT, chunk)
    arrays = [front.bring(x) for x in (hidden_BTD, target_BT, *gradient)]

    def differentiate(index: jax.Array, so_far: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        by_table_DV, by_hidden_BTD = so_far
        hidden_BcD, target_Bc, by_logprob_Bc, by_entropy_Bc = (_cut(x, index, chunk) for x in arrays)
        logits_BcV, log_total_Bc, is_target_BcV = _predict(temperature, table_VD, hidden_BcD, target_Bc)
        probability_BcV = jnp.exp(logits_BcV - log_total_Bc[..., None])
        mean_Bc1 = jnp.sum(probability_BcV * logits_BcV, axis=-1, keepdims=True)
        by_logits_BcV = by_logprob_Bc[..., None] * (is_target_BcV - probability_BcV)
        by_logits_BcV -= by_entropy_Bc[..., None] * probability_BcV * (logits_BcV - mean_Bc1)
        by_logits_BcV = (by_logits_BcV / temperature).astype(table_VD.dtype)
        by_hidden_BcD = jnp.einsum("BcV,VD->BcD", by_logits_BcV, table_VD)
        by_table_DV += jnp.einsum("BcD,BcV->DV", hidden_BcD, by_logits_BcV)
        return by_table_DV, _put(by_hidden_BTD, by_hidden_BcD, index)

    # Across, as `fetch` wants it in memory to scatter it: the other way round it would be copied.
    nothing = (jnp.zeros_like(table_VD.T), jnp.zeros_like(hidden_BTD))
    by_table_DV, by_hidden_BTD = jax.lax.fori_loop(0, front.chunks, differentiate, nothing)
    return by_table_DV.T, front.back(by_hidden_BTD), None, None


_scores.defvjp(_scores_forward, _scores_backward)


@dataclass(frozen=True)
class _Front:
    """What counts in each row, brought to the row's beginning, so that whole chunks are left over behind it.

    Without a sort, which TPUs compile for seconds, and going both ways by gathers alone.
    """

    counts_BT: jax.Array  # bool
    order_BT: jax.Array  # int32: which token stands at each place; past those that count any
    rank_BT: jax.Array  # int32: at which place each token that counts stands
    taken_BT: jax.Array  # bool: places of tokens that count
    chunks: jax.Array  # int32: how many are needed

    def bring(self, x_BT: jax.Array) -> jax.Array:
        """[B, T, ...] in the new order; 0 behind what counts."""
        return _choose(x_BT, self.order_BT, self.taken_BT)

    def back(self, x_BT: jax.Array) -> jax.Array:
        """Undoes `bring`; 0 at what does not count."""
        return _choose(x_BT, self.rank_BT, self.counts_BT)


def _front(counts_BT: jax.Array, chunk: int) -> _Front:
    ends_BT = jnp.cumsum(counts_BT, axis=1, dtype=jnp.int32)
    place_T = jnp.arange(counts_BT.shape[1], dtype=jnp.int32)
    trained_B1 = ends_BT[:, -1:]
    find = partial(jnp.searchsorted, side="right", method="compare_all")
    order_BT = jnp.minimum(jax.vmap(find, (0, None))(ends_BT, place_T), place_T[-1])
    # All devices take as many as the one with most: those that share the vocabulary must agree.
    chunks = most(jnp.max(-(-trained_B1 // chunk)))
    return _Front(counts_BT, order_BT, jnp.maximum(ends_BT - 1, 0), place_T < trained_B1, chunks)


def _choose(x_BT: jax.Array, index_BT: jax.Array, keep_BT: jax.Array) -> jax.Array:
    more = (1,) * (x_BT.ndim - 2)
    chosen_BT = jnp.take_along_axis(x_BT, index_BT.reshape(*index_BT.shape, *more), axis=1)
    return jnp.where(keep_BT.reshape(*keep_BT.shape, *more), chosen_BT, 0)


def _predict(
    temperature: float, table_VD: jax.Array, hidden_BcD: jax.Array, target_Bc: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(logits_BcV, the logarithm of the sum of their exponentials, which of them are the targets')."""
    logits_BcV = qwen.logits(table_VD, hidden_BcD) / temperature
    # A masked sum, not a gather: it stays on the devices that share the vocabulary.
    is_target_BcV = jnp.arange(logits_BcV.shape[-1]) == target_Bc[..., None]
    return logits_BcV, jax.nn.logsumexp(logits_BcV, axis=-1), is_target_BcV


def _cut(x_BT: jax.Array, index: jax.Array, chunk: int) -> jax.Array:
    """The chunk of that number of every row, of [B, T, ...]."""
    return jax.lax.dynamic_slice_in_dim(x_BT, index * chunk, chunk, axis=1)


def _put(x_BT: jax.Array, new_Bc: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x_BT, new_Bc, index * new_Bc.shape[1], axis=1)
