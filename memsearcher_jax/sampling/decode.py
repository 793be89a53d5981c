"""The decoding loop: up to a fixed number of tokens for every active context in one device call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from memsearcher_jax.model import qwen
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.kv_cache import Cache, CacheView, DecodeBuffer, DecodeCache
from memsearcher_jax.model.qwen import Params
from memsearcher_jax.sampling.logits import sample
from memsearcher_jax.sampling.prefill import HostArray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decode:
    """Generates for A contexts, all of whose tokens but the last are cached.

    Of a context that a call in flight decodes, the host does not know the last token, length and remaining tokens yet:
    such a row continues from the `DecodeState` that the call leaves, and reads none of the host's three numbers.
    """

    slot_A: HostArray  # int32: the context's entry of the state; S where the row is unused
    continues_A: HostArray  # bool: from the state
    token_A: HostArray  # int32: the last token
    length_A: HostArray  # int32: tokens of the context
    remaining_A: HostArray  # int32: tokens that its generation may still add; 0: the row is unused
    rng_stream_A2: HostArray  # uint32: numbers of the trajectory and of its context, folded into the key of every draw
    temperature_A: HostArray  # float32
    top_k_A: HostArray  # int32
    top_p_A: HostArray  # float32
    page_table_AI: HostArray  # int32: with room for the new tokens


class _Loop(NamedTuple):
    """What one iteration of the decoding loop hands to the next one."""

    number: Array  # of the iteration, from 0
    last_A: Array  # int32: the token that the iteration feeds
    remaining_A: Array
    count_A: Array
    buffer: DecodeBuffer  # keys and values of the tokens that were fed
    token_AJ: Array
    logprob_AJ: Array
    finite_A: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """What the last call that decoded a slot left, for the next one."""

    token_S: Array  # int32: the last token
    length_S: Array  # int32: tokens of the context
    remaining_S: Array  # int32: tokens that its generation may still add

    @classmethod
    def empty(cls, slots: int) -> DecodeState:
        return cls(*(jnp.zeros(slots, jnp.int32) for _ in range(3)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeOutput:
    """The generated tokens of each row of a `Decode`, left-aligned in J columns."""

    token_AJ: HostArray  # int32; columns from count_A on are undefined
    logprob_AJ: HostArray  # float32: behaviour log-probability
    count_A: HostArray  # int32: generated tokens
    remaining_A: HostArray  # int32; 0: the generation has ended
    finite_A: HostArray  # bool; False: the generation ended because its logits were not finite


def decode(
    model: ModelConfig,
    steps: int,
    stop_ids: tuple[int, ...],
    cache: Cache,
    state: DecodeState,
    params: Params,
    root_key: Array,
    call: Decode,
) -> tuple[Cache, DecodeState, DecodeOutput]:
    """Up to `steps` tokens for every row; returns early when no generation goes on.

    The random number of a draw depends on `root_key`, the context's `rng_stream` and the token's position alone. In
    float32 so does the token: the other rows and the time at which the context was scheduled change its logits by 1e-5
    at most. In bfloat16 they change logits by a rounding error of 2^-8, so another schedule may draw another token; a
    schedule that is repeated draws the same tokens in both types.
    """
    token_A = jnp.where(call.continues_A, state.token_S[call.slot_A], call.token_A)
    length_A = jnp.where(call.continues_A, state.length_S[call.slot_A], call.length_A)
    remaining_A = jnp.where(call.continues_A, state.remaining_S[call.slot_A], call.remaining_A)
    cached_A = length_A - 1
    A = length_A.shape[0]
    view = CacheView.of(cache, call.page_table_AI, cached_A, cached_A, model.attention)

    def context_key(stream_2: Array) -> Array:
        trajectory_key = jax.random.fold_in(root_key, stream_2[0])
        return jax.random.fold_in(trajectory_key, stream_2[1])

    key_A = jax.vmap(context_key)(call.rng_stream_A2)
    # The numbers of all positions that this call may draw for: fewer operations than step by step.
    position_AJ = length_A[:, None] + jnp.arange(steps)
    key_AJ = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(key_A, position_AJ)
    uniform_AJ = jax.vmap(jax.vmap(jax.random.uniform))(key_AJ)

    def any_active(loop: _Loop) -> Array:
        return (loop.number < steps) & jnp.any(loop.remaining_A > 0)

    def step(loop: _Loop) -> _Loop:
        is_active_A = loop.remaining_A > 0
        # Contexts that have ended read nothing.
        active_view = replace(view, length_A=jnp.where(is_active_A, cached_A, 0))
        hidden_A1D, buffer = qwen.forward(
            params,
            model,
            loop.last_A[:, None],
            cached_A[:, None] + loop.number,
            is_active_A[:, None].astype(jnp.int32),
            DecodeCache(active_view, loop.buffer),
            output="hidden",
        )
        assert isinstance(buffer, DecodeBuffer)  # what `DecodeCache.append` returns
        logits_A1V = qwen.logits(qwen.output_embedding(params, model), hidden_A1D)
        uniform_A = jax.lax.dynamic_index_in_dim(uniform_AJ, loop.number, axis=1, keepdims=False)
        rules = (call.temperature_A, call.top_k_A, call.top_p_A)
        drawn_A, logprob_A = sample(logits_A1V[:, 0], uniform_A, *rules, attention=model.attention)
        is_finite_A = jnp.isfinite(logprob_A)
        accepted_A = is_active_A & is_finite_A
        continues_A = accepted_A & ~jnp.isin(drawn_A, jnp.array(stop_ids, jnp.int32))
        return _Loop(
            number=loop.number + 1,
            last_A=jnp.where(accepted_A, drawn_A, loop.last_A),
            remaining_A=jnp.where(continues_A, loop.remaining_A - 1, 0),
            count_A=loop.count_A + accepted_A,
            buffer=buffer,
            token_AJ=jax.lax.dynamic_update_index_in_dim(loop.token_AJ, drawn_A, loop.number, axis=1),
            logprob_AJ=jax.lax.dynamic_update_index_in_dim(loop.logprob_AJ, logprob_A, loop.number, axis=1),
            finite_A=loop.finite_A & (is_finite_A | ~is_active_A),
        )

    initial = _Loop(
        number=jnp.int32(0),
        last_A=token_A,
        remaining_A=remaining_A,
        count_A=jnp.zeros_like(length_A),
        buffer=DecodeBuffer.empty(model, A, steps),
        token_AJ=jnp.zeros((A, steps), jnp.int32),
        logprob_AJ=jnp.zeros((A, steps), jnp.float32),
        finite_A=jnp.ones(A, bool),
    )
    final = jax.lax.while_loop(any_active, step, initial)
    # As many fed tokens are kept as were drawn: the last one drawn has not been fed yet.
    kept_AJ = (jnp.arange(steps) < final.count_A[:, None]).astype(jnp.int32)
    cache = view.append(final.buffer.k_LBKJH, final.buffer.v_LBKJH, kept_AJ)
    state = DecodeState(
        token_S=state.token_S.at[call.slot_A].set(final.last_A, mode="drop"),
        length_S=state.length_S.at[call.slot_A].set(length_A + final.count_A, mode="drop"),
        remaining_S=state.remaining_S.at[call.slot_A].set(final.remaining_A, mode="drop"),
    )
    output = DecodeOutput(final.token_AJ, final.logprob_AJ, final.count_A, final.remaining_A, final.finite_A)
    return cache, state, output
