"""The old log-probabilities of the ratio: the sampler's or the trainer's, and how far these are apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from memsearcher_jax.model.qwen import Params
from memsearcher_jax.ops.axes import constrain_rows
from memsearcher_jax.training import grpo
from memsearcher_jax.training.config import TrainingConfig
from memsearcher_jax.training.logprobs import LogprobFn
from memsearcher_jax.training.packing import PackedBatch, PackedRows

LAST_TURN = 10  # with metrics of its own


def recompute_old_logprobs(
    config: TrainingConfig, logprob_fn: LogprobFn, params: Params, batches: Iterable[PackedBatch]
) -> list[PackedBatch]:
    """The mini-batches of a step with the trainer's log-probabilities in place of the sampler's.

    A ratio against the sampler's log-probabilities takes differences in rounding for changes of the policy. One against
    the trainer's needs one more forward pass; the mismatch with the sampler is then corrected by weights of the losses,
    min(trainer / sampler, cap): truncated importance sampling (Ionides 2008), applied to sampler and trainer by Yao et
    al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".

    `params`: the weights that sampled.
    """
    recomputed = []
    for batch in batches:  # the next one is made while the devices compute
        logprob_BT = logprob_fn(params, batch)
        recomputed.append(_with_old_logprobs(config, batch, logprob_BT))
    return recomputed


@partial(jax.jit, static_argnums=0)
def _with_old_logprobs(config: TrainingConfig, batch: PackedBatch, logprob_BT: jax.Array) -> PackedBatch:
    """The batch with `logprob_BT` as old log-probabilities, and with weights if `config.tis_cap` is set."""
    tis_weight_BT = None
    if config.tis_cap:
        weight_BT = grpo.policy_ratio(jnp.where(batch.mask_BT, logprob_BT - batch.old_logprob_BT, 0))
        tis_weight_BT = jnp.minimum(weight_BT, config.tis_cap)
    resolved = replace(batch, old_logprob_BT=logprob_BT, tis_weight_BT=tis_weight_BT)
    return constrain_rows(resolved)


def mismatch_metrics(rows: PackedRows, logprob_BT: jax.Array) -> dict[str, float]:
    """The sampler's log-probabilities against the trainer's, over the trained tokens of a mini-batch. Collective.

    `logprob_diff_*`: |trainer - sampler| in nats, as the mean, the maximum, and the mean over the contexts of each
    turn, of which those from LAST_TURN on are one. Means count an example as often as its `count`. Both sides are
    untruncated. `logprob_BT`: the trainer's, before any update.
    """
    batch = rows.batch()
    mask_BT = np.asarray(batch.mask_BT)
    count_X = np.asarray(batch.count_BT, np.float64)[mask_BT]
    sampler_X = np.asarray(batch.old_logprob_BT)[mask_BT]
    trainer_BT = multihost_utils.process_allgather(logprob_BT, tiled=True)
    diff_X = np.abs(trainer_BT[mask_BT] - sampler_X).astype(np.float64)
    turns = [min(example.number + 1, LAST_TURN) for example in rows.examples]
    turn_X = rows.per_token(turns, np.int32)[mask_BT]
    metrics = {
        "logprob_diff_mean": float(np.average(diff_X, weights=count_X)),
        "logprob_diff_max": float(diff_X.max()),
    }
    for turn in np.unique(turn_X):
        of_turn_X = turn_X == turn
        mean = np.average(diff_X[of_turn_X], weights=count_X[of_turn_X])
        metrics[f"logprob_diff_mean/turn_{turn}"] = float(mean)
    return metrics
