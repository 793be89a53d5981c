"""The engine against the plain forward pass: what it samples and records, and what it computes only once."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.sampling.config import SamplingParams
from tests.support import NANO


def test_greedy_tokens_are_the_argmax_of_the_full_forward(params, engine, nano):
    """Decoding equals the forward pass, and the context starts with the contiguous prompt."""
    for number, recorded in nano.run_conversations(engine, params, range(4), SamplingParams(temperature=0.0)).items():
        ids = np.array(recorded.ids)
        assert nano.prompt(number) == ids[: len(nano.prompt(number))].tolist()
        sampled = np.flatnonzero(recorded.sampled)
        np.testing.assert_array_equal(ids[sampled], nano.next_token_logprobs(params, ids).argmax(-1)[sampled - 1])


def test_a_generation_ends_at_a_stop_token_or_at_its_limit(params, nano):
    engine = nano.make_engine(stop_ids=tuple(range(0, 264, 3)))
    engine.start(params, nano.key())
    ends = set()
    for number in range(16):
        engine.scheduler.open_context(0, nano.prompt(number), (number, 0), max_tokens=4)
        ids = nano.generate(engine, 0).ids
        engine.scheduler.pop_context(0)
        assert all(id % 3 for id in ids[:-1])
        assert ids[-1] % 3 == 0 or len(ids) == 4
        ends.add(ids[-1] % 3 == 0)
    assert ends == {True, False}


def first_even(ids):
    """The place after the first even id, as `FindStop`."""
    return next((count for count, id in enumerate(ids, start=1) if id % 2 == 0), None)


def conversations_with_stops(engine, params, nano):
    """One conversation of three generations in each slot; slot 0 has no stop, slot 2 replaces each last token."""
    engine.start(params, nano.key())
    for slot in range(4):
        engine.scheduler.open_context(
            slot, nano.prompt(slot), (slot, 0), max_tokens=30, find_stop=first_even if slot else None
        )
    generations, done = {slot: [] for slot in range(4)}, {}
    while len(done) < 4:
        for generation in engine.step():
            slot = generation.slot
            generations[slot].append(generation)
            if len(generations[slot]) == 3:
                done[slot] = engine.scheduler.pop_context(slot)
            else:
                engine.scheduler.extend_context(slot, [51] * 13, 20, first_even if slot else None, drop=int(slot == 2))
    return generations, done, engine.stop()


def test_a_generation_ends_where_the_host_finds_a_stop(params, engine, nano):
    """What was sampled after the stop leaves no trace."""
    generations, done, stats = conversations_with_stops(engine, params, nano)
    for generation in (generation for slot in done for generation in generations[slot]):
        count = first_even(generation.ids) if generation.slot else None
        assert generation.found_stop == (count is not None)
        assert count in (None, len(generation.ids))
    assert sum(generation.found_stop for slot in done for generation in generations[slot]) > 6
    for slot, recorded in done.items():
        nano.assert_recorded_logprobs(params, recorded)
        assert sum(not sampled for sampled in recorded.sampled) == len(nano.prompt(slot)) + 26
    assert stats.appended_tokens + stats.generated_tokens == sum(len(recorded.ids) for recorded in done.values())
    longer = nano.make_engine(replace(nano.SETTINGS, decode_steps_per_call=40))
    _, again, _ = conversations_with_stops(longer, params, nano)
    for slot, recorded in done.items():
        assert again[slot].ids.tolist() == recorded.ids.tolist()


def test_a_context_can_fill_its_slot_to_the_last_token(params, engine, nano):
    engine.start(params, nano.key())
    engine.scheduler.open_context(0, nano.prompt(0), (0, 0), max_tokens=1)
    nano.generate(engine, 0)
    left = nano.SETTINGS.context_tokens - len(nano.prompt(0)) - 1
    assert not engine.scheduler.fits(0, left)
    assert engine.scheduler.fits(0, left - 3)
    engine.scheduler.extend_context(0, [50] * (left - 3), max_tokens=100)
    assert len(nano.generate(engine, 0).ids) <= 3
    nano.assert_recorded_logprobs(params, engine.scheduler.pop_context(0))


def test_in_float32_draws_do_not_depend_on_slots_order_or_batch(params, engine, nano):
    numbers = list(range(7))
    alone = nano.make_engine(replace(nano.SETTINGS, slots=1))
    changes = {"decode_batch_sizes": (1,), "decode_steps_per_call": 2, "prefill_chunk": 4, "prefill_buckets": (16,)}
    other = nano.make_engine(replace(nano.SETTINGS, slots=3, **changes))
    ours = nano.run_conversations(alone, params, numbers)
    same = nano.run_conversations(engine, params, numbers)
    for theirs in (same, nano.run_conversations(other, params, numbers[::-1])):
        for number in numbers:
            assert theirs[number].ids.tolist() == ours[number].ids.tolist()
            assert theirs[number].sampled.tolist() == ours[number].sampled.tolist()
            np.testing.assert_allclose(theirs[number].logprobs, ours[number].logprobs, atol=1e-5)


@pytest.mark.variant
def test_in_int8_draws_do_not_depend_on_slots_order_or_batch(params, nano):
    """Weights and cache rounded; the log-probabilities that are recorded are near those of the exact weights."""
    published = jax.jit(qwen.publish, static_argnums=(1, 2, 3))(params, NANO, "cpu", "int8")
    numbers = list(range(5))
    settings = replace(nano.SETTINGS, weights="int8", kv="int8")
    ours = nano.run_conversations(nano.make_engine(replace(settings, slots=1)), published, numbers)
    other = replace(settings, slots=3, decode_steps_per_call=2, prefill_chunk=4, prefill_buckets=(16,))
    theirs = nano.run_conversations(nano.make_engine(other), published, numbers[::-1])
    for number in numbers:
        assert theirs[number].ids.tolist() == ours[number].ids.tolist()
        np.testing.assert_allclose(theirs[number].logprobs, ours[number].logprobs, atol=1e-5)
        nano.assert_recorded_logprobs(params, ours[number], atol=0.5)


@pytest.mark.variant
def test_in_bfloat16_a_repeated_schedule_draws_the_same_and_any_schedule_the_policys_tokens(params, nano):
    """The batch changes the rounding of logits, so that another schedule may draw other tokens."""
    model, numbers = replace(NANO, compute_dtype="bfloat16"), list(range(7))
    weights = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    engine = nano.make_engine(model=model)
    ours, again = (nano.run_conversations(engine, weights, numbers) for _ in range(2))
    for number in numbers:
        assert ours[number].ids.tolist() == again[number].ids.tolist()
        assert ours[number].logprobs.tolist() == again[number].logprobs.tolist()
    alone = nano.run_conversations(nano.make_engine(replace(nano.SETTINGS, slots=1), model=model), weights, numbers)
    exact = jax.tree.map(lambda x: x.astype("float32"), weights)
    for number in numbers:
        for recorded in (ours[number], alone[number]):
            nano.assert_recorded_logprobs(exact, recorded, atol=0.2)


def test_another_rng_stream_or_key_draws_other_tokens(params, engine, nano):
    drawn = set()
    for key, stream in ((nano.key(), (0, 0)), (nano.key(), (1, 0)), (nano.key(), (0, 1)), (jax.random.key(12), (0, 0))):
        engine.start(params, key)
        engine.scheduler.open_context(0, nano.prompt(0), stream, max_tokens=9)
        drawn.add(nano.generate(engine, 0).ids)
        engine.scheduler.pop_context(0)
    assert len(drawn) == 4


@pytest.mark.variant
def test_eight_devices_draw_the_same_tokens_as_one(params, engine, nano):
    """A replica has two slots, and decodes with one or both of them."""
    numbers = list(range(9))
    one = nano.run_conversations(engine, params, numbers)
    mesh = sharding.make_mesh(MeshConfig(data=4, fsdp=1, tensor=2))
    placed = jax.device_put(params, sharding.param_shardings(NANO, mesh))
    settings = replace(nano.SETTINGS, slots=8, decode_batch_sizes=(1, 2))
    eight = nano.run_conversations(nano.make_engine(settings, mesh), placed, numbers)
    for number in numbers:
        assert eight[number].ids.tolist() == one[number].ids.tolist()
        np.testing.assert_allclose(eight[number].logprobs, one[number].logprobs, atol=1e-5)


def test_no_token_is_prefilled_twice(params, engine, nano):
    """Prefill computes the given text and the last token of each generation, and nothing else."""
    done = nano.run_conversations(engine, params, range(6))
    total = sum(len(recorded.ids) for recorded in done.values())
    stats = engine.stop()
    assert stats.appended_tokens + stats.generated_tokens == total
    # A context prefills its prompt without the last token, which decoding feeds; then the last token of the first
    # generation and the observation, again without the last: one token fewer than were appended.
    assert stats.prefilled_tokens + stats.shared_tokens == stats.appended_tokens - len(done)


def test_nothing_compiles_after_warm_up(params, compilations, nano, fresh_programs):
    engine = nano.make_engine(replace(nano.SETTINGS, decode_batch_sizes=(1, 2)))
    engine.warm_up(params)
    engine.start(params, nano.key())
    with compilations() as count:
        nano.run_conversations(engine, params, range(5))
    assert count == []


def test_weights_cannot_change_while_a_slot_holds_a_context(params, engine, nano):
    engine.start(params, nano.key())
    engine.scheduler.open_context(0, nano.prompt(0), (0, 0), max_tokens=3)
    with pytest.raises(RuntimeError, match="1 slots still hold contexts"):
        engine.start(params, nano.key())
    with pytest.raises(RuntimeError, match="slot 0 is still generating"):
        engine.scheduler.pop_context(0)
    nano.generate(engine, 0)
    engine.scheduler.pop_context(0)
