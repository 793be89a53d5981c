"""The sampler: one frozen state, pure steps, fixed shapes.

A slot holds one context. Its ids stand in a row of `ids_SC`; the cache lags behind and never holds more than all
tokens but the last, because decoding feeds the last token to learn the next. So text is added by writing ids
(`begin`, `extend`), caught up with by `prefill` in compiled widths, and grown by `decode`. Nothing that the cache
holds is ever computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding

from memsearcher_jax.model import qwen
from memsearcher_jax.model.axes import spec
from memsearcher_jax.model.cache import CACHE_AXES, Cache
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.sampling.buffer import Padded, place, splice
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.sampling.logits import draw


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """S contexts of capacity C."""

    ids_SC: Array  # int32: every token of the context, sampled or not
    logprob_SC: Array  # float32: behaviour log-probability where sampled, 0 elsewhere
    sampled_SC: Array  # bool: the policy's own tokens
    length_S: Array  # int32: tokens that stand in ids_SC
    room_S: Array  # int32: tokens that the present generation may still add; 0: the slot does not speak
    stream_S2: Array  # uint32: trajectory and context number, the name of the slot's random draws
    cache: Cache  # cache.length_B <= length_S - 1


def empty_slots(model: ModelConfig, settings: SamplingConfig) -> Slots:
    """S slots that hold nothing."""
    rows, capacity = settings.slots, settings.context_tokens
    return Slots(
        ids_SC=jnp.zeros((rows, capacity), jnp.int32),
        logprob_SC=jnp.zeros((rows, capacity), jnp.float32),
        sampled_SC=jnp.zeros((rows, capacity), bool),
        length_S=jnp.zeros(rows, jnp.int32),
        room_S=jnp.zeros(rows, jnp.int32),
        stream_S2=jnp.zeros((rows, 2), jnp.uint32),
        cache=Cache.empty(model, rows, capacity),
    )


def slot_shardings(mesh: Mesh) -> Slots:
    """A `Slots` with a sharding in place of each array: slots over the mesh's rows, heads over its tensor axis."""
    row = NamedSharding(mesh, spec(("batch",)))
    rows = NamedSharding(mesh, spec(("batch", None)))
    cache = NamedSharding(mesh, spec(CACHE_AXES))
    return Slots(
        ids_SC=rows,
        logprob_SC=rows,
        sampled_SC=rows,
        length_S=row,
        room_S=row,
        stream_S2=rows,
        cache=Cache(k_LBKCH=cache, v_LBKCH=cache, length_B=row),
    )


def begin(slots: Slots, starts_S: Array, stream_S2: Array, room_S: Array, parts: Sequence[Padded]) -> Slots:
    """Opens a fresh context in every slot where `starts_S`: the spliced prompt, an empty cache, a new random stream."""
    prompt = splice(parts)
    prompt = replace(prompt, length_S=jnp.where(starts_S, prompt.length_S, 0))
    kept_S1 = ~starts_S[:, None]
    return Slots(
        ids_SC=place(slots.ids_SC, jnp.zeros_like(prompt.length_S), prompt),
        logprob_SC=jnp.where(kept_S1, slots.logprob_SC, 0.0),
        sampled_SC=slots.sampled_SC & kept_S1,
        length_S=jnp.where(starts_S, prompt.length_S, slots.length_S),
        room_S=jnp.where(starts_S, room_S, slots.room_S),
        stream_S2=jnp.where(starts_S[:, None], stream_S2, slots.stream_S2),
        cache=replace(slots.cache, length_B=jnp.where(starts_S, 0, slots.cache.length_B)),
    )


def extend(slots: Slots, added: Padded, room_S: Array) -> Slots:
    """Appends text to contexts; rows of length 0 stay as they are. Positive `room_S` lets a slot speak after it."""
    return replace(
        slots,
        ids_SC=place(slots.ids_SC, slots.length_S, added),
        length_S=slots.length_S + added.length_S,
        room_S=jnp.where(room_S > 0, room_S, slots.room_S),
    )


def prefill(model: ModelConfig, slots: Slots, params, row_A: Array, *, width: int) -> Slots:
    """Caches up to `width` more standing tokens of the slots `row_A`; a row number of S means nobody."""
    length_A = slots.length_S.at[row_A].get(mode="fill", fill_value=0)
    cache = Cache(
        k_LBKCH=slots.cache.k_LBKCH.at[:, row_A].get(mode="fill", fill_value=0),
        v_LBKCH=slots.cache.v_LBKCH.at[:, row_A].get(mode="fill", fill_value=0),
        length_B=slots.cache.length_B.at[row_A].get(mode="fill", fill_value=0),
    )
    position_AW = cache.length_B[:, None] + jnp.arange(width)
    ids_AW = slots.ids_SC.at[row_A[:, None], position_AW].get(mode="fill", fill_value=0)
    # The last standing token stays out: decode feeds it.
    stands_AW = (position_AW < length_A[:, None] - 1).astype(jnp.int32)
    _, cache = qwen.forward(params, model, ids_AW, position_AW, stands_AW, cache, output="hidden")
    written = Cache(
        k_LBKCH=slots.cache.k_LBKCH.at[:, row_A].set(cache.k_LBKCH, mode="drop"),
        v_LBKCH=slots.cache.v_LBKCH.at[:, row_A].set(cache.v_LBKCH, mode="drop"),
        length_B=slots.cache.length_B.at[row_A].set(cache.length_B, mode="drop"),
    )
    return replace(slots, cache=written)


def decode(
    model: ModelConfig, settings: SamplingConfig, stop_ids: tuple[int, ...], slots: Slots, params, root_key: Array
) -> Slots:
    """Up to `settings.decode_tokens` tokens for every slot that speaks; ends early when none does.

    A draw is keyed by the slot's stream and the token's position alone: it does not depend on the slot, on what shares
    the batch, or on when the slot was scheduled.
    """
    rows = jnp.arange(slots.length_S.shape[0])
    stream_key_S = jax.vmap(lambda stream: jax.random.fold_in(jax.random.fold_in(root_key, stream[0]), stream[1]))(
        slots.stream_S2
    )

    def speaking(carry: tuple[Array, Slots]) -> Array:
        step, slots = carry
        return (step < settings.decode_tokens) & jnp.any(slots.room_S > 0)

    def step(carry: tuple[Array, Slots]) -> tuple[Array, Slots]:
        step, slots = carry
        speaks_S = slots.room_S > 0
        last_S = slots.length_S - 1
        ids_S1 = slots.ids_SC[rows, last_S][:, None]
        hidden_S1D, cache = qwen.forward(
            params, model, ids_S1, last_S[:, None], speaks_S[:, None].astype(jnp.int32), slots.cache, output="hidden"
        )
        logits_SV = qwen.logits(params, model, hidden_S1D)[:, 0]
        key_S = jax.vmap(jax.random.fold_in)(stream_key_S, slots.length_S)
        token_S, logprob_S = draw(logits_SV, key_S, settings)
        column_S = jnp.where(speaks_S, slots.length_S, slots.ids_SC.shape[1])
        stopped_S = jnp.isin(token_S, jnp.array(stop_ids))
        slots = replace(
            slots,
            ids_SC=slots.ids_SC.at[rows, column_S].set(token_S, mode="drop"),
            logprob_SC=slots.logprob_SC.at[rows, column_S].set(logprob_S, mode="drop"),
            sampled_SC=slots.sampled_SC.at[rows, column_S].set(True, mode="drop"),
            length_S=slots.length_S + speaks_S,
            room_S=jnp.where(speaks_S & ~stopped_S, slots.room_S - 1, 0),
            cache=cache,
        )
        return step + 1, slots

    _, slots = jax.lax.while_loop(speaking, step, (jnp.int32(0), slots))
    return slots
