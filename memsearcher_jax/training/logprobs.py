"""Log-probabilities and entropies of packed rows, computed in chunks that never hold [T, V] logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

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


class TokenScores(NamedTuple):
    """What a model says of the trained tokens, float32; 0 elsewhere. Entry t belongs to ids[t]."""

    logprob_BT: jax.Array  # of the token, given those before it in its segment
    entropy_BT: jax.Array  # of the distribution that the token is one draw of
    teacher_BT: jax.Array  # mean log-probability of the teacher's tokens by their probabilities; 0 without them


class Targets(NamedTuple):
    """Tokens in the place of each token, and weights of their log-probabilities."""

    ids_BTK: jax.Array
    weight_BTK: jax.Array


def token_logprobs(
    params: Params, model_config: ModelConfig, batch: PackedBatch, *, chunk: int, temperature: float
) -> TokenScores:
    """The scores of each trained token.

    Logits are divided by `temperature`, as in sampling. They exist for `chunk` trained tokens of each row at a time,
    and are recomputed in the backward pass.
    """
    before = _before_logits(params, model_config, batch)
    targets = [Targets(batch.ids_BT[..., None], jnp.ones((*batch.ids_BT.shape, 1)))]
    if batch.teacher_ids_BTK is not None and batch.teacher_probability_BTK is not None:
        targets.append(Targets(batch.teacher_ids_BTK, batch.teacher_probability_BTK))
    # The prediction of token t + 1 is computed at position t.
    next_targets = jax.tree.map(partial(jnp.roll, shift=-1, axis=1), targets)
    predicted: Any = _target_scores(
        chunk, temperature, before.table_VD, before.hidden_BTD, next_targets, before.mask_BT
    )
    scores = [jnp.roll(score_BT, 1, axis=1) for score_BT in predicted]
    entropy_BT = scores[0]
    logprob_BT = scores[1]
    teacher_BT = scores[2] if len(scores) > 2 else jnp.zeros_like(logprob_BT)
    return TokenScores(logprob_BT, entropy_BT, teacher_BT)


def top_tokens(
    params: Params, model_config: ModelConfig, batch: PackedBatch, count: int, *, chunk: int, temperature: float
) -> Targets:
    """The `count` most likely tokens in the place of each trained token, and their probabilities; 0 elsewhere."""
    before = _before_logits(params, model_config, batch)
    compaction = _compaction(before.mask_BT, chunk)
    hidden_BTD = compaction.compact(before.hidden_BTD)

    def choose(index: jax.Array, top: Targets) -> Targets:
        hidden_BcD = _read_chunk(hidden_BTD, index, chunk)
        logits_BcV, logsumexp_Bc = _chunk_logits(temperature, before.table_VD, hidden_BcD)
        logit_BcK, ids_BcK = jax.lax.top_k(logits_BcV, count)
        probability_BcK = jnp.exp(logit_BcK - logsumexp_Bc[..., None])
        return Targets(_write_chunk(top.ids_BTK, ids_BcK, index), _write_chunk(top.weight_BTK, probability_BcK, index))

    nothing = _no_targets((*before.mask_BT.shape, count))
    top = jax.lax.fori_loop(0, compaction.num_chunks, choose, nothing)
    return jax.tree.map(lambda x_BTK: jnp.roll(compaction.expand(x_BTK), 1, axis=1), top)


def _no_targets(shape: Sequence[int]) -> Targets:
    return Targets(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))


@lru_cache(maxsize=8)
def make_logprob_fn(
    model_config: ModelConfig, config: TrainingConfig, *, temperature: float, top_k: int = 0
) -> LogprobFn:
    """A compiled `(params, batch) -> logprob_BT`; with `top_k` its result is that of `top_tokens`.

    It computes one micro-batch at a time and skips empty ones at the end. `config` as `update.fit_to_mesh` returns it.
    Runs of one process share the function if their settings agree.
    """
    settings = {"chunk": config.logit_chunk, "temperature": temperature}

    def local_logprobs(params: Params, batch: PackedBatch) -> jax.Array | Targets:
        def body(carry: None, microbatch: PackedBatch) -> tuple[None, jax.Array | Targets]:
            if top_k:
                return carry, top_tokens(params, model_config, microbatch, top_k, **settings)
            return carry, token_logprobs(params, model_config, microbatch, **settings).logprob_BT

        split = microbatches.split(batch, config.grad_accum_steps)
        shape = split.ids_BT.shape
        nothing = _no_targets((*shape, top_k)) if top_k else jnp.zeros(shape, jnp.float32)
        count = microbatches.num_nonempty(split.segment_BT)
        _, logprobs = microbatches.scan_first(body, None, split, nothing, count)
        return microbatches.merge(logprobs)

    @jax.jit
    def logprobs(params: Params, batch: PackedBatch) -> jax.Array | Targets:
        axes_BT = ("batch", None)
        return shard_map_by_rows(local_logprobs, (qwen.param_axes(model_config), axes_BT), axes_BT)(params, batch)

    return logprobs


class _BeforeLogits(NamedTuple):
    table_VD: jax.Array  # of the output layer
    hidden_BTD: jax.Array
    mask_BT: jax.Array  # of the positions that predict a trained token


def _before_logits(params: Params, model_config: ModelConfig, batch: PackedBatch) -> _BeforeLogits:
    hidden_BTD, _ = qwen.forward(
        params, model_config, batch.ids_BT, batch.position_BT, batch.segment_BT, output="hidden"
    )
    # Position t predicts token t + 1; the last position of a row predicts nothing.
    mask_BT = jnp.roll(batch.mask_BT, -1, axis=1).at[:, -1].set(False)
    table_VD, hidden_BTD = qwen.output_embedding_after(params, model_config, hidden_BTD)
    return _BeforeLogits(table_VD, hidden_BTD, mask_BT)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _target_scores(
    chunk: int,
    temperature: float,
    table_VD: jax.Array,
    hidden_BTD: jax.Array,
    targets: Sequence[Targets],
    mask_BT: jax.Array,
) -> tuple[jax.Array, ...]:
    """(entropy_BT of the predictions, then the weighted log-probability_BT of each of the `targets`).

    Both are 0 where `mask_BT` is not set. The derivative is written by hand: JAX differentiates only loops with a fixed
    number of chunks, and a `cond` that skips a chunk would save its operands, the table among them, once per chunk.
    """
    compaction = _compaction(mask_BT, chunk)
    hidden_BTD = compaction.compact(hidden_BTD)
    targets = jax.tree.map(compaction.compact, targets)

    def score(index: jax.Array, scores: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        hidden_BcD, targets_Bc = _read_chunk((hidden_BTD, targets), index, chunk)
        logits_BcV, logsumexp_Bc = _chunk_logits(temperature, table_VD, hidden_BcD)
        probability_BcV = jnp.exp(logits_BcV - logsumexp_Bc[..., None])
        entropy_Bc = logsumexp_Bc - jnp.sum(probability_BcV * logits_BcV, axis=-1)
        chunk_scores = [entropy_Bc]
        for target in targets_Bc:
            weight_BcV, total_Bc = _by_token(target, logits_BcV)
            chunk_scores.append(jnp.sum(weight_BcV * logits_BcV, axis=-1) - total_Bc * logsumexp_Bc)
        return tuple(_write_chunk(x_BT, new_Bc, index) for x_BT, new_Bc in zip(scores, chunk_scores, strict=True))

    zeros_BT = jnp.zeros(mask_BT.shape, jnp.float32)
    scores = jax.lax.fori_loop(0, compaction.num_chunks, score, (zeros_BT,) * (1 + len(targets)))
    return tuple(map(compaction.expand, scores))


def _target_scores_fwd(chunk: int, temperature: float, *arguments: Any):
    return _target_scores(chunk, temperature, *arguments), arguments


def _target_scores_bwd(
    chunk: int, temperature: float, arguments: tuple[Any, ...], gradient: tuple[jax.Array, ...]
) -> tuple[jax.Array | None, ...]:
    """The derivatives by `table_VD` and `hidden_BTD`; the others have none.

    With p the softmax of logits l, H its entropy, and w the targets' weights by token, of total W:
    d sum(w log p) / dl = w - W p, dH / dl = -p (l - sum(p l)).
    """
    table_VD, hidden_BTD, targets, mask_BT = arguments
    compaction = _compaction(mask_BT, chunk)
    arrays = jax.tree.map(compaction.compact, (hidden_BTD, targets, gradient))

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
    grad_table_DV, grad_hidden_BTD = jax.lax.fori_loop(0, compaction.num_chunks, differentiate, zeros)
    return grad_table_DV.T, compaction.expand(grad_hidden_BTD), None, None


_target_scores.defvjp(_target_scores_fwd, _target_scores_bwd)


class _Compaction(NamedTuple):
    """Moves the masked-in tokens of each row to its start, so that the chunks behind them can be skipped."""

    compact: Callable[[jax.Array], jax.Array]  # of [B, T, ...]; what is not masked in becomes 0
    expand: Callable[[jax.Array], jax.Array]  # the inverse
    num_chunks: jax.Array  # the largest number of chunks that a row fills


def _compaction(mask_BT: jax.Array, chunk: int) -> _Compaction:
    """The compaction by a mask: gathers in both directions, because a sort takes seconds to compile for a TPU."""
    running_BT = jnp.cumsum(mask_BT, axis=1, dtype=jnp.int32)
    position_T = jnp.arange(mask_BT.shape[1], dtype=jnp.int32)
    count_B1 = running_BT[:, -1:]
    # Not "compare_all", which compares every pair of positions: time and memory grow with the square of the row.
    search = partial(jnp.searchsorted, side="right", method="scan")
    source_BT = jnp.minimum(jax.vmap(search, (0, None))(running_BT, position_T), position_T[-1])
    rank_BT = jnp.maximum(running_BT - 1, 0)
    return _Compaction(
        compact=partial(_take, index_BT=source_BT, keep_BT=position_T < count_B1),
        expand=partial(_take, index_BT=rank_BT, keep_BT=mask_BT),
        # The maximum over all devices: those that share the vocabulary must run the same number of chunks.
        num_chunks=pmax(jnp.max(-(-count_B1 // chunk))),
    )


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
    ids_KBc1 = jnp.moveaxis(target.ids_BTK, -1, 0)[..., None]
    weight_KBc1 = jnp.moveaxis(target.weight_BTK, -1, 0)[..., None]
    weight_BcV = jnp.zeros((), jnp.float32)
    for ids_Bc1, weight_Bc1 in zip(ids_KBc1, weight_KBc1, strict=True):
        weight_BcV += jnp.where(tokens_V == ids_Bc1, weight_Bc1, 0)
    return weight_BcV, jnp.sum(target.weight_BTK, axis=-1)


def _read_chunk(tree: Any, index: jax.Array, chunk: int) -> Any:
    return jax.tree.map(lambda x_BT: jax.lax.dynamic_slice_in_dim(x_BT, index * chunk, chunk, axis=1), tree)


def _write_chunk(x_BT: jax.Array, new_Bc: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x_BT, new_Bc, index * new_Bc.shape[1], axis=1)
