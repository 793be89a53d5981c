"""Whose log-probabilities a ratio compares with: those that the sampler recorded, or the trainer's own.

Two programs of one model round differently, and a ratio takes the difference for a change of the policy. Comparing with
the trainer's own log-probabilities avoids that for one more forward pass; what then separates the policy that drew from
the policy that is improved is a weight on the loss, min(trainer / sampler, cap): truncated importance sampling
(Ionides 2008), between sampler and trainer as in Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from memsearcher_jax.model import sharding
from memsearcher_jax.training import grpo, masked
from memsearcher_jax.training.config import TrainingConfig
from memsearcher_jax.training.rows import Rows


def settle_old_logprobs(
    config: TrainingConfig, score: Callable[[dict, Rows], jax.Array], params: dict, batches: Sequence[Rows]
) -> tuple[list[Rows], dict[str, float]]:
    """The mini-batches of a step as they are to be trained on, and what was found; before the first of them is.

    batches: as packed, with the sampler's log-probabilities. `score` gives logprob_BT under `params`, the weights that
    sampled. With `config.importance_cap` every batch gets its importance_BT, which is 1 where the sampler's stay.
    Numbers, unless nothing was to be found: `logprob_difference` and `logprob_difference_max` between the two on the
    first mini-batch, in nats per trained token, and `old_logprobs_recomputed`, 1 or 0.
    """
    if config.old_logprobs == "sampler":
        return list(batches), {}
    first_BT = score(params, batches[0])
    mean, largest = map(float, _difference(batches[0], first_BT))
    # Not "above": a difference that is not a number is no agreement.
    recompute = config.old_logprobs == "trainer" or not mean <= config.old_logprob_threshold
    found = {
        "logprob_difference": mean,
        "logprob_difference_max": largest,
        "old_logprobs_recomputed": float(recompute),
    }
    if not recompute:
        return [_with_old(config, batch, batch.old_logprob_BT) for batch in batches], found
    rest = (score(params, batch) for batch in batches[1:])
    return [_with_old(config, *pair) for pair in zip(batches, (first_BT, *rest), strict=True)], found


@jax.jit
def _difference(rows: Rows, logprob_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    difference_BT = jnp.abs(logprob_BT - rows.old_logprob_BT)
    return masked.mean(difference_BT, rows.mask_BT), masked.largest(difference_BT, rows.mask_BT)


@partial(jax.jit, static_argnums=0)
def _with_old(config: TrainingConfig, rows: Rows, logprob_BT: jax.Array) -> Rows:
    """Rows that compare with `logprob_BT`, weighted for having been drawn at `rows.old_logprob_BT`."""
    importance_BT = None
    if config.importance_cap:
        # The weight is of what the ratio is of: a token, or a sequence.
        weight_BT = grpo.policy_ratio(logprob_BT - rows.old_logprob_BT, rows.mask_BT, config.ratio, rows.segment_BT)
        importance_BT = jnp.minimum(weight_BT, config.importance_cap)
    settled = replace(rows, old_logprob_BT=logprob_BT, importance_BT=importance_BT)
    # Whoever's they are, they lie alike, or the update would compile for each.
    return jax.tree.map(lambda x: sharding.constrain(x, ("batch", None)), settled)
