"""The engine against the plain forward pass: what it samples, what it records, what it never computes twice."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.sampling.parts import Parts
from memsearcher_jax.testing import NANO


def test_recorded_logprobs_are_those_of_the_full_forward(params, engine, nano):
    engine.start(params, nano.key())
    for number in range(4):
        nano.assert_recorded_truly(params, nano.converse(engine, number))


def test_greedy_tokens_are_the_argmax_of_the_full_forward(params, nano):
    """Decode equals forward, and the padded buffers equal the contiguous prompt, token by token."""
    engine = nano.make_engine(replace(nano.SETTINGS, temperature=0.0))
    engine.start(params, nano.key())
    for number in range(4):
        recorded = nano.converse(engine, number)
        ids = np.array(recorded.ids)
        assert nano.flat(nano.prompt(number)) == ids[: len(nano.prompt(number))].tolist()
        sampled = np.flatnonzero(recorded.sampled)
        np.testing.assert_array_equal(ids[sampled], nano.predictions(params, ids).argmax(-1)[sampled - 1])


def test_a_generation_ends_at_a_stop_token_or_at_its_limit(params, nano):
    engine = nano.make_engine(stop_ids=tuple(range(0, 264, 3)))
    engine.start(params, nano.key())
    ends = set()
    for number in range(16):
        engine.begin(0, nano.prompt(number), (number, 0), max_tokens=4)
        ids = nano.speak(engine, 0).ids
        engine.take(0)
        assert all(id % 3 for id in ids[:-1])
        assert ids[-1] % 3 == 0 or len(ids) == 4
        ends.add(ids[-1] % 3 == 0)
    assert ends == {True, False}


def test_a_context_may_fill_its_slot_to_the_last_token(params, engine, nano):
    engine.start(params, nano.key())
    engine.begin(0, nano.prompt(0), (0, 0), max_tokens=1)
    nano.speak(engine, 0)
    left = nano.SETTINGS.context_tokens - len(nano.prompt(0)) - 1
    assert not engine.fits(0, left)
    assert engine.fits(0, left - 3)
    engine.extend(0, [50] * (left - 3), max_tokens=100)
    assert len(nano.speak(engine, 0).ids) <= 3
    nano.assert_recorded_truly(params, engine.take(0))


def test_slots_order_and_company_do_not_matter(params, engine, nano):
    numbers = list(range(7))
    alone = nano.make_engine(replace(nano.SETTINGS, slots=1, rows_per_call=1))
    other = nano.make_engine(replace(nano.SETTINGS, slots=3, decode_tokens=2, prefill_piece=4, prefill_buckets=(16,)))
    fewer = nano.make_engine(replace(nano.SETTINGS, decode_rows=(1, 3)))
    ours = nano.run_all(alone, params, numbers)
    others = [nano.run_all(engine, params, numbers), nano.run_all(fewer, params, numbers)]
    for theirs in (*others, nano.run_all(other, params, numbers[::-1])):
        for number in numbers:
            assert theirs[number].ids == ours[number].ids
            assert theirs[number].sampled == ours[number].sampled
            np.testing.assert_allclose(theirs[number].logprobs, ours[number].logprobs, atol=1e-5)


def test_another_stream_or_key_draws_other_tokens(params, engine, nano):
    drawn = set()
    for key, stream in ((nano.key(), (0, 0)), (nano.key(), (1, 0)), (nano.key(), (0, 1)), (jax.random.key(12), (0, 0))):
        engine.start(params, key)
        engine.begin(0, nano.prompt(0), stream, max_tokens=9)
        drawn.add(nano.speak(engine, 0).ids)
        engine.take(0)
    assert len(drawn) == 4


def test_eight_devices_sample_what_one_does(params, nano):
    settings = replace(nano.SETTINGS, slots=8)
    numbers = list(range(9))
    one = nano.run_all(nano.make_engine(settings), params, numbers)
    mesh = sharding.make_mesh(MeshConfig(data=4, fsdp=1, tensor=2))
    placed = jax.device_put(params, sharding.param_shardings(NANO, mesh))
    for rows in ((), (1, 2)):  # two are all the slots of a copy
        eight = nano.run_all(nano.make_engine(replace(settings, decode_rows=rows), mesh), placed, numbers)
        for number in numbers:
            assert eight[number].ids == one[number].ids
            np.testing.assert_allclose(eight[number].logprobs, one[number].logprobs, atol=1e-5)


def test_no_token_is_prefilled_twice(params, engine, nano):
    """Prefill sees the standing text and the last token of each generation, and nothing else."""
    done = nano.run_all(engine, params, range(6))
    total = sum(len(recorded.ids) for recorded in done.values())
    counters = engine.counters
    assert counters.standing_tokens + counters.generated_tokens == total
    # A context prefills its prompt but the last token, which decode feeds; then the last token of the first
    # generation and the observation, again but the last: one token less than was given.
    assert counters.prefilled_tokens + counters.shared_tokens == counters.standing_tokens - len(done)


def test_nothing_compiles_after_warm_up(params, compilations, nano):
    engine = nano.make_engine(replace(nano.SETTINGS, decode_rows=(1, 2)))
    engine.warm_up(params)
    engine.start(params, nano.key())
    with compilations() as count:
        nano.run_all(engine, params, range(5))
    assert count == []


def test_a_call_is_for_as_few_slots_as_have_room():
    parts = Parts(count=2, size=4)
    for speaking, rows in (([], 1), ([5], 1), ([0, 7], 1), ([0, 1], 2), ([0, 3, 6], 2)):
        seats, row_A = parts.fewest(speaking, (1, 2))
        assert list(seats) == speaking and len(row_A) == parts.count * rows
        for slot, seat in seats.items():
            assert row_A[seat] == slot % parts.size and seat // rows == slot // parts.size
        assert np.count_nonzero(row_A == parts.size) == len(row_A) - len(speaking), "the others are nobody"
    assert parts.fewest([0, 1, 2], (1, 2)) == ({0: 0, 1: 1, 2: 2}, None)


def test_weights_can_not_change_under_a_context(params, engine, nano):
    engine.start(params, nano.key())
    engine.begin(0, nano.prompt(0), (0, 0), max_tokens=3)
    with pytest.raises(RuntimeError, match="1 slots still hold contexts"):
        engine.start(params, nano.key())
    with pytest.raises(RuntimeError, match="slot 0 is still speaking"):
        engine.take(0)
    nano.speak(engine, 0)
    engine.take(0)
