"""Log-probabilities and entropies of packed rows, computed in chunks that never hold [T, V] logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import cast

import jax
import jax.numpy as jnp

from memsearcher_jax.model import projections, qwen
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.qwen import Params
from memsearcher_jax.ops.axes import pmax, shard_map_by_rows
from memsearcher_jax.training import microbatches
from memsearcher_jax.training.config import TrainingConfig
from memsearcher_jax.training.packing import PackedBatch

LogprobFn = Callable[[Params, PackedBatch], jax.Array]
"""(params, batch) -> logprob_BT."""
MoveFn = Callable[[jax.Array], jax.Array]


def token_logprobs(
    params: Params, model_config: ModelConfig, batch: PackedBatch, *, chunk: int, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """(logprob_BT, entropy_BT), float32, of each trained token given the tokens before it in its segment; 0 elsewhere.

    Logits are divided by `temperature`, as in sampling. Entry t of both belongs to ids[t].
    Logits exist for `chunk` trained tokens of each row at a time, and are recomputed in the backward pass.
    """
    hidden_BTD, _ = qwen.forward(
        params, model_config, batch.ids_BT, batch.position_BT, batch.segment_BT, output="hidden"
    )
    # Position t predicts token t + 1; the last position of a row predicts nothing.
    target_BT = jnp.roll(batch.ids_BT, -1, axis=1)
    mask_BT = jnp.roll(batch.mask_BT, -1, axis=1).at[:, -1].set(False)
    table_VD, hidden_BTD = qwen.output_embedding_after(params, model_config, hidden_BTD)
    scores = _target_scores(chunk, temperature, table_VD, hidden_BTD, target_BT, mask_BT)
    logprob_BT, entropy_BT = cast(tuple[jax.Array, jax.Array], scores)
    return jnp.roll(logprob_BT, 1, axis=1), jnp.roll(entropy_BT, 1, axis=1)


@lru_cache(maxsize=8)
def make_logprob_fn(model_config: ModelConfig, config: TrainingConfig, *, temperature: float) -> LogprobFn:
    """A compiled `(params, batch) -> logprob_BT`, which computes one micro-batch at a time and skips empty ones.

    `config` as `update.fit_to_mesh` returns it. Runs of one process share the function if their settings agree.
    """

    def local_logprobs(params: Params, batch: PackedBatch) -> jax.Array:
        def body(carry: None, microbatch: PackedBatch) -> tuple[None, jax.Array]:
            logprob_BT, _ = token_logprobs(
                params, model_config, microbatch, chunk=config.logit_chunk, temperature=temperature
            )
            return carry, logprob_BT

        split = microbatches.split(batch, config.grad_accum_steps)
        zeros_nBT = jnp.zeros(split.ids_BT.shape, jnp.float32)
        count = microbatches.num_nonempty(split.segment_BT)
        _, logprobs = microbatches.scan_first(body, None, split, zeros_nBT, count)
        return microbatches.merge(logprobs)

    @jax.jit
    def logprobs(params: Params, batch: PackedBatch) -> jax.Array:
        axes_BT = ("batch", None)
        return shard_map_by_rows(local_logprobs, (qwen.param_axes(model_config), axes_BT), axes_BT)(params, batch)

    return logprobs


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _target_scores(
    chunk: int,
    temperature: float,
    table_VD: jax.Array,
    hidden_BTD: jax.Array,
    target_BT: jax.Array,
    mask_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(logprob_BT of the targets, entropy_BT of the predictions) where mask_BT is set; 0 elsewhere.

    The derivative is written by hand: JAX differentiates only loops with a fixed number of chunks, and a `cond` that
    skips a chunk would save its operands, the table among them, once per chunk.
    """
    compact, expand, num_chunks = _compaction(mask_BT, chunk)
    hidden_BTD, target_BT = compact(hidden_BTD), compact(target_BT)

    def score(index: jax.Array, scores: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden_BcD, target_Bc = (_read_chunk(x, index, chunk) for x in (hidden_BTD, target_BT))
        logits_BcV, logsumexp_Bc, is_target_BcV = _chunk_logits(temperature, table_VD, hidden_BcD, target_Bc)
        logprob_Bc = jnp.sum(jnp.where(is_target_BcV, logits_BcV, 0), axis=-1) - logsumexp_Bc
        probability_BcV = jnp.exp(logits_BcV - logsumexp_Bc[..., None])
        entropy_Bc = logsumexp_Bc - jnp.sum(probability_BcV * logits_BcV, axis=-1)
        return _write_chunk(scores[0], logprob_Bc, index), _write_chunk(scores[1], entropy_Bc, index)

    zeros_BT = jnp.zeros(target_BT.shape, jnp.float32)
    logprob_BT, entropy_BT = jax.lax.fori_loop(0, num_chunks, score, (zeros_BT, zeros_BT))
    return expand(logprob_BT), expand(entropy_BT)


def _target_scores_fwd(chunk: int, temperature: float, *arguments: jax.Array):
    return _target_scores(chunk, temperature, *arguments), arguments


def _target_scores_bwd(
    chunk: int, temperature: float, arguments: tuple[jax.Array, ...], gradient: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    """With p the softmax of logits l, and H its entropy: d logprob / dl = [target] - p, dH / dl = -p (l - sum(p l))."""
    table_VD, hidden_BTD, target_BT, mask_BT = arguments
    compact, expand, num_chunks = _compaction(mask_BT, chunk)
    arrays = [compact(x) for x in (hidden_BTD, target_BT, *gradient)]

    def differentiate(index: jax.Array, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        grad_table_DV, grad_hidden_BTD = gradients
        hidden_BcD, target_Bc, grad_logprob_Bc, grad_entropy_Bc = (_read_chunk(x, index, chunk) for x in arrays)
        logits_BcV, logsumexp_Bc, is_target_BcV = _chunk_logits(temperature, table_VD, hidden_BcD, target_Bc)
        probability_BcV = jnp.exp(logits_BcV - logsumexp_Bc[..., None])
        mean_Bc1 = jnp.sum(probability_BcV * logits_BcV, axis=-1, keepdims=True)
        grad_logits_BcV = grad_logprob_Bc[..., None] * (is_target_BcV - probability_BcV)
        grad_logits_BcV -= grad_entropy_Bc[..., None] * probability_BcV * (logits_BcV - mean_Bc1)
        grad_logits_BcV = (grad_logits_BcV / temperature).astype(table_VD.dtype)
        grad_hidden_BcD = projections.einsum("BcV,VD->BcD", grad_logits_BcV, table_VD)
        grad_table_DV += projections.einsum("BcD,BcV->DV", hidden_BcD, grad_logits_BcV)
        return grad_table_DV, _write_chunk(grad_hidden_BTD, grad_hidden_BcD, index)

    # Transposed, the layout in which `all_gather_param` scatters it: otherwise the compiler copies it.
    zeros = (jnp.zeros_like(table_VD.T), jnp.zeros_like(hidden_BTD))
    grad_table_DV, grad_hidden_BTD = jax.lax.fori_loop(0, num_chunks, differentiate, zeros)
    return grad_table_DV.T, expand(grad_hidden_BTD), None, None


_target_scores.defvjp(_target_scores_fwd, _target_scores_bwd)


def _compaction(mask_BT: jax.Array, chunk: int) -> tuple[MoveFn, MoveFn, jax.Array]:
    """(compact, expand, num_chunks): `compact` moves the masked-in tokens of each row of [B, T, ...] to its start.

    So the chunks behind them can be skipped. `expand` is the inverse; both fill with 0. They gather in both directions
    and use no sort, which takes seconds to compile for a TPU.
    """
    running_BT = jnp.cumsum(mask_BT, axis=1, dtype=jnp.int32)
    position_T = jnp.arange(mask_BT.shape[1], dtype=jnp.int32)
    count_B1 = running_BT[:, -1:]
    # Not "compare_all", which compares every pair of positions: time and memory grow with the square of the row.
    search = partial(jnp.searchsorted, side="right", method="scan")
    source_BT = jnp.minimum(jax.vmap(search, (0, None))(running_BT, position_T), position_T[-1])
    rank_BT = jnp.maximum(running_BT - 1, 0)
    # The maximum over all devices: those that share the vocabulary must run the same number of chunks.
    num_chunks = pmax(jnp.max(-(-count_B1 // chunk)))
    compact = partial(_take, index_BT=source_BT, keep_BT=position_T < count_B1)
    return compact, partial(_take, index_BT=rank_BT, keep_BT=mask_BT), num_chunks


def _take(x_BT: jax.Array, index_BT: jax.Array, keep_BT: jax.Array) -> jax.Array:
    ones = (1,) * (x_BT.ndim - 2)
    taken_BT = jnp.take_along_axis(x_BT, index_BT.reshape(*index_BT.shape, *ones), axis=1)
    return jnp.where(keep_BT.reshape(*keep_BT.shape, *ones), taken_BT, 0)


def _chunk_logits(
    temperature: float, table_VD: jax.Array, hidden_BcD: jax.Array, target_Bc: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(logits_BcV, logsumexp_Bc, is_target_BcV)."""
    logits_BcV = qwen.logits(table_VD, hidden_BcD) / temperature
    # A mask instead of a gather keeps the selection local to the devices that share the vocabulary.
    is_target_BcV = jnp.arange(logits_BcV.shape[-1]) == target_Bc[..., None]
    return logits_BcV, jax.nn.logsumexp(logits_BcV, axis=-1), is_target_BcV


def _read_chunk(x_BT: jax.Array, index: jax.Array, chunk: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x_BT, index * chunk, chunk, axis=1)


def _write_chunk(x_BT: jax.Array, new_Bc: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x_BT, new_Bc, index * new_Bc.shape[1], axis=1)
