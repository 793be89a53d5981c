"""The sampler: one frozen state, pure steps, fixed shapes.

A slot holds one context. Its ids stand in a row of `ids_SC`; the cache lags behind and never holds more than all
tokens but the last, because decoding feeds the last token to learn the next. So text is added by writing ids
(`begin`, `extend`), caught up with by `prefill` in compiled widths, and grown by `decode`. The prefix with which most
contexts begin is held once for all (`hold_prefix`), what another slot's cache holds already is copied (`share`), and
nothing that is held is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memsearcher_jax.model import qwen
from memsearcher_jax.model.axes import spec
from memsearcher_jax.model.cache import (
    CACHE_AXES,
    Cache,
    Growing,
    Prefix,
    Reading,
    Recent,
    copy_rows,
    put_rows,
    take_rows,
)
from memsearcher_jax.model.config import ModelConfig
from memsearcher_jax.sampling.buffer import Padded, place, splice
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.sampling.logits import draw
from memsearcher_jax.sampling.speculation import propose, verified


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Texts:
    """S contexts of capacity C, as ids."""

    ids_SC: Array  # int32: every token of the context, sampled or not
    length_S: Array  # int32: tokens that stand in ids_SC
    room_S: Array  # int32: tokens that the present generation may still add; 0: the slot does not speak
    stream_S2: Array  # uint32: trajectory and context number, the name of the slot's random draws


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """The sampler's whole state."""

    texts: Texts
    cache: Cache  # of what stands behind the prefix; together they hold at most texts.length_S - 1 tokens
    prefix: Cache  # one row
    follows_S: Array  # bool: contexts that begin with the prefix


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drawn:
    """What one call of `decode` added to each slot that took part, and how the slot stands after it.

    J columns, left-aligned.
    """

    token_SJ: Array  # int32; columns past what the slot's length grew by mean nothing
    logprob_SJ: Array  # float32: behaviour log-probability
    length_S: Array  # int32
    room_S: Array  # int32; 0: the generation has ended
    sound_S: Array  # bool; False: the generation ended because its logits were not finite


def empty_slots(model: ModelConfig, settings: SamplingConfig, prefix_tokens: int) -> Slots:
    """S slots that hold nothing, with room for a prefix of so many tokens."""
    rows, capacity = settings.slots, settings.context_tokens
    texts = Texts(
        ids_SC=jnp.zeros((rows, capacity), jnp.int32),
        length_S=jnp.zeros(rows, jnp.int32),
        room_S=jnp.zeros(rows, jnp.int32),
        stream_S2=jnp.zeros((rows, 2), jnp.uint32),
    )
    prefix = Cache.empty(model, 1, max(1, prefix_tokens), page=max(1, prefix_tokens))
    return Slots(texts, Cache.empty(model, rows, capacity), prefix, jnp.zeros(rows, bool))


def slot_shardings(mesh: Mesh) -> Slots:
    """A `Slots` with a sharding in place of each array: slots over the mesh's rows, heads over its tensor axis."""
    row, rows = NamedSharding(mesh, spec(("batch",))), NamedSharding(mesh, spec(("batch", None)))
    cache, one = NamedSharding(mesh, spec(CACHE_AXES)), NamedSharding(mesh, spec((None, None, *CACHE_AXES[2:])))
    everywhere = NamedSharding(mesh, PartitionSpec())
    return Slots(
        Texts(rows, row, row, rows),
        Cache(k_LBNKHP=cache, v_LBNKPH=cache, length_B=row),
        Cache(k_LBNKHP=one, v_LBNKPH=one, length_B=everywhere),
        row,
    )


def hold_prefix(model: ModelConfig, slots: Slots, params, ids_1W: Array, count: Array) -> Slots:
    """The prefix is now the first `count` of these tokens. No context may stand that begins with the one before."""
    column_1W = jnp.arange(ids_1W.shape[1])[None]
    stands_1W = (column_1W < count).astype(jnp.int32)
    prefix = Cache.empty(model, 1, slots.prefix.capacity, slots.prefix.page)
    _, prefix = qwen.forward(params, model, ids_1W, column_1W, stands_1W, prefix, output="hidden")
    return replace(slots, prefix=prefix)


def begin(
    slots: Slots,
    row_A: Array,
    stream_A2: Array,
    room_A: Array,
    follows_A: Array,
    cached_A: Array,
    parts: Sequence[Padded],
) -> Slots:
    """Opens a fresh context in the slots `row_A`: the spliced prompt, a new random stream.

    Where the prompt begins with the prefix, `follows_A` says so. Of what comes then, the slot's cache has the first
    `cached_A` tokens. A row number of S means nobody, here and in `extend`.
    """
    texts, prompt = slots.texts, splice(parts)
    texts = Texts(
        ids_SC=place(texts.ids_SC, jnp.zeros_like(row_A), prompt, row_A),
        length_S=texts.length_S.at[row_A].set(prompt.length_S, mode="drop"),
        room_S=texts.room_S.at[row_A].set(room_A, mode="drop"),
        stream_S2=texts.stream_S2.at[row_A].set(stream_A2, mode="drop"),
    )
    return replace(
        slots,
        texts=texts,
        cache=replace(slots.cache, length_B=slots.cache.length_B.at[row_A].set(cached_A, mode="drop")),
        follows_S=slots.follows_S.at[row_A].set(follows_A, mode="drop"),
    )


def extend(slots: Slots, row_A: Array, room_A: Array, added: Padded) -> Slots:
    """Appends text to the contexts of the slots `row_A` and lets them speak after it."""
    texts = slots.texts
    start_A = texts.length_S.at[row_A].get(mode="fill", fill_value=0)
    texts = replace(
        texts,
        ids_SC=place(texts.ids_SC, start_A, added, row_A),
        length_S=texts.length_S.at[row_A].add(added.length_S, mode="drop"),
        room_S=texts.room_S.at[row_A].set(room_A, mode="drop"),
    )
    return replace(slots, texts=texts)


def share(slots: Slots, source_A: Array, target_A: Array, length_A: Array) -> Slots:
    """The cache's first `length_A` entries of the slots `source_A` become those of the slots `target_A`.

    Both contexts begin with the prefix, or both do not. Source and target name slots as `model.cache` names rows.
    """
    return replace(slots, cache=copy_rows(slots.cache, source_A, target_A, length_A))


def silence(slots: Slots) -> Slots:
    """Slots that have nothing to say."""
    return replace(slots, texts=replace(slots.texts, room_S=jnp.zeros_like(slots.texts.room_S)))


def prefill(
    model: ModelConfig,
    slots: Slots,
    params,
    ids_BT: Array,
    position_BT: Array,
    segment_BT: Array,
    row_A: Array,
    start_A: Array,
    follows_A: Array,
) -> Slots:
    """Caches a block of tokens, cut into A pieces that go behind what the slots `row_A` hold: see `pieces.Block`."""
    entry_A = start_A - jnp.where(follows_A, slots.prefix.length_B, 0)
    reading = Reading.of(slots.cache, row_A, entry_A, prefix=Prefix(slots.prefix, follows_A))
    _, cache = qwen.forward(params, model, ids_BT, position_BT, segment_BT, reading, output="hidden")
    return replace(slots, cache=cache)


def decode(
    model: ModelConfig,
    settings: SamplingConfig,
    stop_ids: tuple[int, ...],
    slots: Slots,
    params,
    root_key: Array,
    row_A: Array | None = None,
) -> tuple[Slots, Drawn]:
    """Up to `settings.decode_tokens` tokens for every slot that speaks; ends early when none does.

    `row_A` names the slots that take part, as `model.cache` names rows, where not all do: whoever is left out costs
    nothing. They come back in that order.

    A draw is keyed by the slot's stream and the token's position alone: it does not depend on the slot, on what shares
    the batch, on when the slot was scheduled, or on whether the token was guessed.
    """
    width = 1 + settings.draft_tokens
    steps = max(1, settings.decode_tokens // width)
    texts, follows_S = slots.texts, slots.follows_S
    if row_A is not None:
        texts, follows_S = jax.tree.map(lambda x_S: take_rows(x_S, row_A), (texts, follows_S))
    opening_S1, column_T = texts.length_S[:, None], jnp.arange(width)
    prefix = Prefix(slots.prefix, follows_S)
    stop_K = jnp.array(stop_ids, jnp.int32)
    key_S = jax.vmap(lambda stream_2: jax.random.fold_in(jax.random.fold_in(root_key, stream_2[0]), stream_2[1]))(
        texts.stream_S2
    )

    def speaking(carry) -> Array:
        step, texts, *_ = carry
        return (step < steps) & jnp.any(texts.room_S > 0)

    def step(carry):
        number, texts, recent, token_SJ, logprob_SJ, sound_S = carry
        speaks_S1 = texts.room_S[:, None] > 0
        last_S1 = texts.length_S[:, None] - 1
        draft_SD, guessed_S = propose(texts.ids_SC, texts.length_S, settings.draft_tokens)
        ids_ST = jnp.concatenate([jnp.take_along_axis(texts.ids_SC, last_S1, axis=1), draft_SD], axis=1)
        segment_ST = speaks_S1 & (column_T <= guessed_S[:, None])
        hidden_STD, grown = qwen.forward(
            params,
            model,
            ids_ST,
            last_S1 + column_T,
            segment_ST.astype(jnp.int32),
            Growing(Reading.of(slots.cache, row_A, reads_A=speaks_S1[:, 0], prefix=prefix), recent),
            output="hidden",
        )
        logits_STV = qwen.logits(qwen.output_table(params, model), hidden_STD)
        position_ST = texts.length_S[:, None] + column_T
        key_ST = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(key_S, position_ST)
        flat = (logits_STV.reshape(-1, logits_STV.shape[-1]), key_ST.reshape(-1))
        token_ST, logprob_ST = (x.reshape(position_ST.shape) for x in draw(*flat, settings))

        stops_ST = jnp.isin(token_ST, stop_K)
        finite_ST = jnp.isfinite(logprob_ST)
        taken_ST = segment_ST & verified(token_ST, draft_SD, ends_ST=stops_ST | ~finite_ST)
        sound_S &= ~jnp.any(taken_ST & ~finite_ST, axis=1)
        taken_ST &= finite_ST & (column_T < texts.room_S[:, None])
        added_S = jnp.sum(taken_ST, axis=1, dtype=jnp.int32)
        goes_on_S = sound_S & ~jnp.any(taken_ST & stops_ST, axis=1)

        def place_taken(values_SX: Array, new_ST: Array, start_S1: Array) -> Array:
            column_ST = jnp.where(taken_ST, start_S1 + column_T, values_SX.shape[1])
            # Row by row: of one scatter for all rows a compiler does not know that each device has its own.
            return jax.vmap(lambda x_X, at_T, new_T: x_X.at[at_T].set(new_T, mode="drop"))(values_SX, column_ST, new_ST)

        texts = replace(
            texts,
            ids_SC=place_taken(texts.ids_SC, token_ST, texts.length_S[:, None]),
            length_S=texts.length_S + added_S,
            room_S=jnp.where(goes_on_S, texts.room_S - added_S, 0),
        )
        # Of the tokens that were fed, those that turned out to stand in the context are kept.
        recent = grown.with_visible(taken_ST, at=recent.used)
        offset_S1 = position_ST[:, :1] - opening_S1
        token_SJ = place_taken(token_SJ, token_ST, offset_S1)
        logprob_SJ = place_taken(logprob_SJ, logprob_ST, offset_S1)
        return number + 1, texts, recent, token_SJ, logprob_SJ, sound_S

    rows, entries = texts.length_S.shape[0], steps * width
    recent = Recent.empty(slots.cache, rows, entries)
    nothing = (jnp.zeros((rows, entries), jnp.int32), jnp.zeros((rows, entries), jnp.float32), jnp.ones(rows, bool))
    _, texts, recent, *drawn = jax.lax.while_loop(speaking, step, (jnp.int32(0), texts, recent, *nothing))
    token_SJ, logprob_SJ, sound_S = drawn
    recent = recent.closed_up() if settings.draft_tokens else recent
    reading = Reading.of(slots.cache, row_A)
    cache = reading.append(recent.k_LBKJH, recent.v_LBKJH, recent.visible_BJ.astype(jnp.int32))
    drawn = Drawn(token_SJ, logprob_SJ, texts.length_S, texts.room_S, sound_S)
    if row_A is not None:
        texts = jax.tree.map(lambda x_S, x_A: put_rows(x_S, row_A, x_A), slots.texts, texts)
    return replace(slots, texts=texts, cache=cache), drawn
