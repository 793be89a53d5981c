"""The decoding loop: up to a fixed number of tokens for every active context in one device call."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array

from memsearcher_jax.model import qwen
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.model.kv_cache import Cache, CacheView, DecodeBuffer, DecodeCache
from memsearcher_jax.model.qwen import Params
from memsearcher_jax.sampling.logits import sample
from memsearcher_jax.sampling.prefill import HostArray
from memsearcher_jax.sampling.speculation import accepted, propose


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decode:
    """Generates for A contexts, all of whose tokens but the last are cached."""

    token_A: HostArray  # int32: the last token
    length_A: HostArray  # int32: tokens of the context
    remaining_A: HostArray  # int32: tokens that its generation may still add; 0: the row is unused
    rng_stream_A2: HostArray  # uint32: numbers of the trajectory and of its context, folded into the key of every draw
    temperature_A: HostArray  # float32
    top_k_A: HostArray  # int32
    top_p_A: HostArray  # float32
    page_table_AN: HostArray  # int32: with room for the new tokens
    ids_AC: HostArray | None = None  # int32: all tokens, from which drafts are taken; only for speculative decoding


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
    tokens_per_call: int,
    draft_tokens: int,
    stop_ids: tuple[int, ...],
    cache: Cache,
    params: Params,
    root_key: Array,
    call: Decode,
) -> tuple[Cache, DecodeOutput]:
    """Up to `tokens_per_call` tokens for every row, or one step of a draft; returns early when no generation goes on.

    The random number of a draw depends on `root_key`, the context's `rng_stream` and the token's position alone. In
    float32 so does the token: the other rows, the time at which the context was scheduled and whether the token was
    drafted change its logits by 1e-5 at most. In bfloat16 they change logits by a rounding error of 2^-8, so another
    schedule may draw another token; a schedule that is repeated draws the same tokens in both types.
    """
    window = 1 + draft_tokens  # tokens that one step feeds for a context: its last one and the draft
    steps = max(1, tokens_per_call // window)
    cached_A, column_T = call.length_A - 1, jnp.arange(window)
    view = CacheView.of(cache, call.page_table_AN, cached_A, cached_A)
    key_A = jax.vmap(lambda stream_2: jax.random.fold_in(jax.random.fold_in(root_key, stream_2[0]), stream_2[1]))(
        call.rng_stream_A2
    )
    # The numbers of all positions that this call may draw for: fewer operations than step by step.
    position_AJ = call.length_A[:, None] + jnp.arange(steps * window)
    key_AJ = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(key_A, position_AJ)
    uniform_AJ = jax.vmap(jax.vmap(jax.random.uniform))(key_AJ)
    # One rule for each column of the window, in the order of the flattened logits.
    rules = [jnp.repeat(rule_A, window) for rule_A in (call.temperature_A, call.top_k_A, call.top_p_A)]

    def any_active(carry) -> Array:
        number, _, _, remaining_A, *_ = carry
        return (number < steps) & jnp.any(remaining_A > 0)

    def step(carry):
        number, last_A, length_A, remaining_A, ids_AC, buffer, token_AJ, logprob_AJ, finite_A = carry
        is_active_A = remaining_A > 0
        draft_AW, drafted_A = propose(ids_AC, length_A, draft_tokens)
        ids_AT = jnp.concatenate([last_A[:, None], draft_AW], axis=1)
        segment_AT = is_active_A[:, None] & (column_T <= drafted_A[:, None])
        # Contexts that have ended read nothing.
        active_view = replace(view, length_A=jnp.where(is_active_A, cached_A, 0))
        hidden_ATD, buffer_after = qwen.forward(
            params,
            model,
            ids_AT,
            length_A[:, None] - 1 + column_T,
            segment_AT.astype(jnp.int32),
            DecodeCache(active_view, buffer),
            output="hidden",
        )
        assert isinstance(buffer_after, DecodeBuffer)  # what `DecodeCache.append` returns
        logits_ATV = qwen.logits(qwen.output_embedding(params, model), hidden_ATD)
        position_AT = length_A[:, None] + column_T
        offset_A1 = position_AT[:, :1] - call.length_A[:, None]
        uniform_AT = jnp.take_along_axis(uniform_AJ, offset_A1 + column_T, axis=1)
        drawn = sample(logits_ATV.reshape(-1, logits_ATV.shape[-1]), uniform_AT.reshape(-1), *rules)
        token_AT, logprob_AT = (x.reshape(position_AT.shape) for x in drawn)

        is_stop_AT = jnp.isin(token_AT, jnp.array(stop_ids, jnp.int32))
        is_finite_AT = jnp.isfinite(logprob_AT)
        accepted_AT = segment_AT & accepted(token_AT, draft_AW, is_stop_AT | ~is_finite_AT)
        accepted_AT &= column_T < remaining_A[:, None]
        finite_A &= ~jnp.any(accepted_AT & ~is_finite_AT, axis=1)
        accepted_AT &= is_finite_AT
        count_A = jnp.sum(accepted_AT, axis=1, dtype=jnp.int32)
        continues_A = finite_A & ~jnp.any(accepted_AT & is_stop_AT, axis=1)

        def write(values_AX: Array, new_AT: Array, start_A1: Array) -> Array:
            column_AT = jnp.where(accepted_AT, start_A1 + column_T, values_AX.shape[1])
            # Row by row: in one scatter for all rows the compiler cannot see that each device writes its rows only.
            return jax.vmap(lambda x_X, at_T, new_T: x_X.at[at_T].set(new_T, mode="drop"))(values_AX, column_AT, new_AT)

        # As many fed tokens stay visible as draws were accepted: the last accepted draw has not been fed yet.
        buffer = buffer_after.with_visible(accepted_AT, at=buffer.used)
        newest_A = jnp.take_along_axis(token_AT, jnp.maximum(count_A - 1, 0)[:, None], axis=1)[:, 0]
        return (
            number + 1,
            jnp.where(count_A > 0, newest_A, last_A),
            length_A + count_A,
            jnp.where(continues_A, remaining_A - count_A, 0),
            None if ids_AC is None else write(ids_AC, token_AT, position_AT[:, :1]),
            buffer,
            write(token_AJ, token_AT, offset_A1),
            write(logprob_AJ, logprob_AT, offset_A1),
            finite_A,
        )

    shape_AJ = (call.length_A.shape[0], steps * window)
    initial = (
        jnp.int32(0),
        call.token_A,
        call.length_A,
        call.remaining_A,
        call.ids_AC,
        DecodeBuffer.empty(cache, *shape_AJ),
        jnp.zeros(shape_AJ, jnp.int32),
        jnp.zeros(shape_AJ, jnp.float32),
        jnp.ones(shape_AJ[0], bool),
    )
    final = jax.lax.while_loop(any_active, step, initial)
    _, _, length_A, remaining_A, _, buffer, token_AJ, logprob_AJ, finite_A = final
    buffer = buffer.compact() if draft_tokens else buffer
    cache = view.append(buffer.k_LBKJH, buffer.v_LBKJH, buffer.visible_BJ.astype(jnp.int32))
    count_A = length_A - call.length_A
    return cache, DecodeOutput(token_AJ, logprob_AJ, count_A, remaining_A, finite_A)
