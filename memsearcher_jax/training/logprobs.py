"""Log-probabilities and entropies of packed rows, computed in chunks that never hold [T, V] logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from memsearcher_jax.model import projections, qwen
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.qwen import Params
from memsearcher_jax.ops.axes import pmax, shard_map_by_rows
from memsearcher_jax.training import microbatches
from memsearcher_jax.training.config import TrainingConfig
from memsearcher_jax.training.packing import PackedBatch

LogprobFn = Callable[[Params, PackedBatch], Any]
"""(params, batch) -> logprob_BT, or the `Targets` of `top_tokens`."""
MoveFn = Callable[[jax.Array], jax.Array]
Targets = tuple[jax.Array, jax.Array]
"""(ids_BTK, weight_BTK): tokens, and weights of their log-probabilities."""


def token_logprobs(
    params: Params, model_config: ModelConfig, batch: PackedBatch, *, chunk: int, temperature: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(logprob_BT, entropy_BT, teacher_BT), float32, of each trained token given those before it in its segment; 0
    elsewhere. `teacher_BT` is the mean log-probability of the teacher's tokens by their probabilities; 0 without them.

    Logits are divided by `temperature`, as in sampling. Entry t of each belongs to ids[t].
    Logits exist for `chunk` trained tokens of each row at a time, and are recomputed in the backward pass.
    """
    table_VD, hidden_BTD, mask_BT = _before_logits(params, model_config, batch)
    targets = [(batch.ids_BT[..., None], jnp.ones((*batch.ids_BT.shape, 1)))]
    if batch.teacher_ids_BTK is not None and batch.teacher_probability_BTK is not None:
        targets.append((batch.teacher_ids_BTK, batch.teacher_probability_BTK))
    targets = jax.tree.map(partial(jnp.roll, shift=-1, axis=1), targets)
    scores = _target_scores(chunk, temperature, table_VD, hidden_BTD, targets, mask_BT)
    entropy_BT, logprob_BT, *teacher = (jnp.roll(x_BT, 1, axis=1) for x_BT in cast(tuple[jax.Array, ...], scores))
    return logprob_BT, entropy_BT, teacher[0] if teacher else jnp.zeros_like(logprob_BT)


def top_tokens(
    params: Params, model_config: ModelConfig, batch: PackedBatch, count: int, *, chunk: int, temperature: float
) -> Targets:
    """(ids_BTK, probability_BTK) of the `count` most likely tokens in the place of each trained token; 0 elsewhere."""
    table_VD, hidden_BTD, mask_BT = _before_logits(params, model_config, batch)
    compact, expand, num_chunks = _compaction(mask_BT, chunk)
    hidden_BTD = compact(hidden_BTD)

    def choose(index: jax.Array, top: Targets) -> Targets:
        logits_BcV, logsumexp_Bc = _chunk_logits(temperature, table_VD, _read_chunk(hidden_BTD, index, chunk))
        logit_BcK, ids_BcK = jax.lax.top_k(logits_BcV, count)
        probability_BcK = jnp.exp(logit_BcK - logsumexp_Bc[..., None])
        return _write_chunk(top[0], ids_BcK, index), _write_chunk(top[1], probability_BcK, index)

    shape = (*mask_BT.shape, count)
    top = jax.lax.fori_loop(0, num_chunks, choose, (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)))
    return cast(Targets, tuple(jnp.roll(expand(x_BTK), 1, axis=1) for x_BTK in top))


@lru_cache(maxsize=8)
def make_logprob_fn(
    model_config: ModelConfig, config: TrainingConfig, *, temperature: float, top_k: int = 0
) -> LogprobFn:
    """A compiled `(params, batch) -> logprob_BT`, which computes one micro-batch at a time and skips empty ones; with
    `top_k` its result is that of `top_tokens`.

    `config` as `update.fit_to_mesh` returns it. Runs of one process share the function if their settings agree.
    """
    settings = {"chunk": config.logit_chunk, "temperature": temperature}

    def local_logprobs(params: Params, batch: PackedBatch) -> jax.Array | Targets:
        def body(carry: None, microbatch: PackedBatch) -> tuple[None, jax.Array | Targets]:
            if top_k:
                return carry, top_tokens(params, model_config, microbatch, top_k, **settings)
            return carry, token_logprobs(params, model_config, microbatch, **settings)[0]

        split = microbatches.split(batch, config.grad_accum_steps)
        shape = split.ids_BT.shape
        top = jnp.zeros((*shape, top_k), jnp.int32), jnp.zeros((*shape, top_k), jnp.float32)
        count = microbatches.num_nonempty(split.segment_BT)
        _, logprobs = microbatches.scan_first(body, None, split, top if top_k else jnp.zeros(shape, jnp.float32), count)
        return microbatches.merge(logprobs)

    @jax.jit
    def logprobs(params: Params, batch: PackedBatch) -> jax.Array | Targets:
        axes_BT = ("batch", None)
        return shard_map_by_rows(local_logprobs, (qwen.param_axes(model_config), axes_BT), axes_BT)(params, batch)

    return logprobs


def _before_logits(
    params: Params, model_config: ModelConfig, batch: PackedBatch
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(table_VD of the output layer, hidden_BTD, mask_BT of the positions that predict a trained token)."""
    hidden_BTD, _ = qwen.forward(
        params, model_config, batch.ids_BT, batch.position_BT, batch.segment_BT, output="hidden"
    )
    # Position t predicts token t + 1; the last position of a row predicts nothing.
    mask_BT = jnp.roll(batch.mask_BT, -1, axis=1).at[:, -1].set(False)
    return *qwen.output_embedding_after(params, model_config, hidden_BTD), mask_BT


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _target_scores(
    chunk: int,
    temperature: float,
    table_VD: jax.Array,
    hidden_BTD: jax.Array,
    targets: Sequence[Targets],
    mask_BT: jax.Array,
) -> tuple[jax.Array, ...]:
    """(entropy_BT of the predictions, the weighted log-probability_BT of each targets) where mask_BT is set; 0
    elsewhere.

    The derivative is written by hand: JAX differentiates only loops with a fixed number of chunks, and a `cond` that
    skips a chunk would save its operands, the table among them, once per chunk.
    """
    compact, expand, num_chunks = _compaction(mask_BT, chunk)
    hidden_BTD, targets = jax.tree.map(compact, (hidden_BTD, targets))

    def score(index: jax.Array, scores: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        hidden_BcD, targets_Bc = _read_chunk((hidden_BTD, targets), index, chunk)
        logits_BcV, logsumexp_Bc = _chunk_logits(temperature, table_VD, hidden_BcD)
        probability_BcV = jnp.exp(logits_BcV - logsumexp_Bc[..., None])
        found = [logsumexp_Bc - jnp.sum(probability_BcV * logits_BcV, axis=-1)]
        for target in targets_Bc:
            weight_BcV, total_Bc = _by_token(target, logits_BcV)
            found.append(jnp.sum(weight_BcV * logits_BcV, axis=-1) - total_Bc * logsumexp_Bc)
        return tuple(_write_chunk(x_BT, new_Bc, index) for x_BT, new_Bc in zip(scores, found, strict=True))

    zeros_BT = jnp.zeros(mask_BT.shape, jnp.float32)
    scores = jax.lax.fori_loop(0, num_chunks, score, (zeros_BT,) * (1 + len(targets)))
    return tuple(map(expand, scores))


def _target_scores_fwd(chunk: int, temperature: float, *arguments: Any):
    return _target_scores(chunk, temperature, *arguments), arguments


def _target_scores_bwd(
    chunk: int, temperature: float, arguments: tuple[Any, ...], gradient: tuple[jax.Array, ...]
) -> tuple[jax.Array | None, ...]:
    """With p the softmax of logits l, H its entropy, and w the targets' weights by token, of total W:
    d sum(w log p) / dl = w - W p, dH / dl = -p (l - sum(p l))."""
    table_VD, hidden_BTD, targets, mask_BT = arguments
    compact, expand, num_chunks = _compaction(mask_BT, chunk)
    arrays = jax.tree.map(compact, (hidden_BTD, targets, gradient))

    def differentiate(index: jax.Array, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        grad_table_DV, grad_hidden_BTD = gradients
        hidden_BcD, targets_Bc, (grad_entropy_Bc, *grad_logprobs) = _read_chunk(arrays, index, chunk)
        logits_BcV, logsumexp_Bc = _chunk_logits(temperature, table_VD, hidden_BcD)
        probability_BcV = jnp.exp(logits_BcV - logsumexp_Bc[..., None])
        mean_Bc1 = jnp.sum(probability_BcV * logits_BcV, axis=-1, keepdims=True)
        grad_logits_BcV = -grad_entropy_Bc[..., None] * probability_BcV * (logits_BcV - mean_Bc1)
        for target, grad_logprob_Bc in zip(targets_Bc, grad_logprobs, strict=True):
            weight_BcV, total_Bc = _by_token(target, logits_BcV)
            grad_logits_BcV += grad_logprob_Bc[..., None] * (weight_BcV - total_Bc[..., None] * probability_BcV)
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


def _chunk_logits(temperature: float, table_VD: jax.Array, hidden_BcD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(logits_BcV, logsumexp_Bc)."""
    logits_BcV = qwen.logits(table_VD, hidden_BcD) / temperature
    return logits_BcV, jax.nn.logsumexp(logits_BcV, axis=-1)


def _by_token(target: Targets, logits_BcV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(weight_BcV, their sum)."""
    # Masks instead of a scatter keep this local to the devices that share the vocabulary.
    tokens_V = jnp.arange(logits_BcV.shape[-1])
    parts = (jnp.moveaxis(x_BcK, -1, 0)[..., None] for x_BcK in target)
    weight_BcV = sum(jnp.where(tokens_V == ids_Bc1, weight_Bc1, 0) for ids_Bc1, weight_Bc1 in zip(*parts, strict=True))
    return cast(jax.Array, weight_BcV), jnp.sum(target[1], axis=-1)


def _read_chunk(tree: Any, index: jax.Array, chunk: int) -> Any:
    return jax.tree.map(lambda x_BT: jax.lax.dynamic_slice_in_dim(x_BT, index * chunk, chunk, axis=1), tree)


def _write_chunk(x_BT: jax.Array, new_Bc: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x_BT, new_Bc, index * new_Bc.shape[1], axis=1)
