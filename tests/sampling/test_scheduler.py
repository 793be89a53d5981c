"""The arrays of device calls: fixed shapes, one share for each replica, exactly the requested tokens."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from memsearcher_jax.sampling.config import SamplingParams
from memsearcher_jax.sampling.decode import DecodeOutput
from memsearcher_jax.sampling.logits import draw
from memsearcher_jax.sampling.prefill import CopyPages, Prefill
from memsearcher_jax.sampling.scheduler import Scheduler

RULE = SamplingParams(0.5, 3, 0.9)


def finished(decode, tokens=()) -> DecodeOutput:
    """An output in which every generation ends after `tokens`."""
    A, count = len(decode.length_A), len(tokens)
    token_AJ = np.broadcast_to(np.array(tokens, np.int32), (A, count))
    zeros_A = np.zeros(A, np.int32)
    zeros_AJ = np.zeros((A, count))
    return DecodeOutput(token_AJ, zeros_AJ, zeros_A + count, zeros_A, np.ones(A, bool))


def test_prefill_calls_hold_the_uncached_tokens_of_each_replica(nano):
    scheduler = Scheduler(replace(nano.SETTINGS, page_tokens=8), replicas=2)
    prompts = {0: [*range(10, 30)], 1: [*range(30, 33)], 3: [*range(40, 52)]}
    for slot, ids in prompts.items():
        scheduler.open_context(slot, ids, (slot, 5), 3, RULE)
    step = scheduler.schedule()
    (call,) = step.calls
    assert isinstance(call, Prefill) and call.ids_BT.shape == (2, 48)
    assert call.ids_BT[0].tolist() == [*range(10, 29), *[0] * 5, 30, 31, *[0] * 22]
    assert call.ids_BT[1].tolist() == [*range(40, 51), *[0] * 37]
    assert call.segment_BT[0].tolist() == [*[1] * 19, *[0] * 5, 2, 2, *[0] * 22]
    assert call.start_A.tolist() == [0, 8, 16, 0, 0, 0, 0, 8, 0, 0, 0, 0]
    assert call.length_A.tolist() == [0] * 12
    assert call.position_BT[0, 8:24].tolist() == [*range(8, 24)]
    pages = call.page_table_AI[0, :3].tolist()
    assert len(set(pages)) == 3 and (call.page_table_AI[:3, :3] == pages).all()
    decode = step.decode
    assert {row: decoded.context.slot for row, decoded in step.rows.items()} == {0: 0, 1: 1, 2: 3}
    assert decode.slot_A.tolist() == [0, 1, 3, 4] and not decode.continues_A.any()
    assert decode.token_A.tolist() == [29, 32, 51, 0] and decode.length_A.tolist() == [20, 3, 12, 1]
    assert decode.remaining_A.tolist() == [3, 3, 3, 0] and decode.rng_stream_A2[1].tolist() == [1, 5]
    assert decode.temperature_A[0] == 0.5 and decode.top_k_A[1] == 3 and decode.top_p_A[2] == np.float32(0.9)


def test_decoding_uses_the_smallest_batch_that_holds_the_active_slots(nano):
    for slots, rows in (([5], 1), ([0, 7], 1), ([0, 1], 2), ([0, 3, 6], 2), ([0, 1, 2], 4)):
        scheduler = Scheduler(replace(nano.SETTINGS, slots=8, decode_batch_sizes=(1, 2, 9)), replicas=2)
        for slot in slots:
            scheduler.open_context(slot, [10 + slot], (slot, 0), 3, RULE)
        step = scheduler.schedule()
        assert len(step.decode.length_A) == 2 * rows
        assert sorted(context.slot for context, _ in step.rows.values()) == slots
        for row, (context, _) in step.rows.items():
            assert row // rows == context.slot // 4 and step.decode.token_A[row] == 10 + context.slot


def test_a_long_prompt_does_not_stall_those_that_decode(nano):
    """A step prefills a bounded number of tokens; who is not ready yet does not decode."""
    scheduler = Scheduler(replace(nano.SETTINGS, prefill_tokens_per_step=16), replicas=1)
    scheduler.open_context(0, [9], (0, 0), 99, RULE)
    scheduler.open_context(1, [*range(100)], (1, 0), 9, RULE)
    prefilled, steps = 0, 0
    while True:
        step = scheduler.schedule()
        prefilled += sum(int((call.segment_BT > 0).sum()) for call in step.calls)
        steps += 1
        if len(step.rows) == 2:
            break
        assert [context.slot for context, _ in step.rows.values()] == [0]
        assert sum(call.ids_BT.size for call in step.calls) <= 48
    assert prefilled == 99 and steps == 3


def test_copies_are_split_into_calls_of_one_shape(nano):
    scheduler = Scheduler(replace(nano.SETTINGS, slots=20, page_tokens=8), replicas=2)
    for slot in range(10):
        scheduler.open_context(slot, [1, 2, 3, slot + 9, 5], (slot, 0), 3, RULE)
    copies = [call for call in scheduler.schedule().calls if isinstance(call, CopyPages)]
    used = [int((call.source_A != call.target_A).sum()) for call in copies]
    assert used == [8, 1] and {len(call.source_A) for call in copies} == {16}
    assert all(not call.target_A[8:].any() for call in copies), "the second replica has nothing to copy"


def test_an_empty_prompt_and_a_full_context_are_refused(nano):
    scheduler = Scheduler(nano.SETTINGS, replicas=1)
    with pytest.raises(ValueError, match="at least one token"):
        scheduler.open_context(0, [], (0, 0), 3, RULE)
    for tokens, max_tokens in ((128, 3), (129, 3), (127, 0)):
        message = f"{tokens} tokens and max_tokens {max_tokens} leave none to generate"
        with pytest.raises(ValueError, match=message):
            scheduler.open_context(0, [1] * tokens, (0, 0), max_tokens, RULE)
    assert not scheduler.fits(None, 128) and scheduler.fits(None, 127)
    assert scheduler.free_slots == list(range(4))


def test_text_that_does_not_fit_changes_nothing(nano):
    scheduler = Scheduler(nano.SETTINGS, replicas=1)
    scheduler.open_context(0, [1, 2], (0, 0), 3, RULE)
    step = scheduler.schedule()
    scheduler.update(step, finished(step.decode, (8, 9)))
    with pytest.raises(ValueError, match="a context of 203 tokens and max_tokens 3 leave none to generate"):
        scheduler.extend_context(0, [5] * 200, 3, drop=1)
    assert scheduler.pop_context(0).ids.tolist() == [1, 2, 8, 9]
    stats = scheduler.clear()
    assert (stats.appended_tokens, stats.prompt_tokens, stats.generated_tokens) == (2, 2, 2)


def test_rules_that_float32_cannot_hold_are_the_nearest_that_it_can(nano):
    """Logits divided by a temperature of 1e-38 overflow, and a nucleus of probability 0 is empty."""
    scheduler = Scheduler(nano.SETTINGS, replicas=1)
    for slot, rule in enumerate((SamplingParams(1e-38, 0, 1e-60), SamplingParams(1e-5, 0, 0.1))):
        scheduler.open_context(slot, [1, 2], (slot, 0), 3, rule)
    call = scheduler.schedule().decode
    assert call.temperature_A[0] == 0 and 0 < call.temperature_A[1] < 2e-5
    assert call.top_p_A[0] > 0 and call.top_p_A[1] == np.float32(0.1)
    logits_SV = jnp.array([[3.0, 60.0, -5.0, 59.0], [3.0, 60.0, -5.0, 59.0]])
    for temperature_S in (call.temperature_A[:2], np.ones(2, np.float32)):
        token_S, logprob_S = draw(logits_SV, np.full(2, 0.9), temperature_S, call.top_k_A[:2], call.top_p_A[:2])
        assert token_S.tolist() == [1, 1] and np.isfinite(logprob_S).all()


def test_a_cache_smaller_than_one_context_is_refused(nano):
    with pytest.raises(ValueError, match=r"kv_tokens 200 does not hold one context .* of 2 replicas: raise it to 256"):
        Scheduler(replace(nano.SETTINGS, kv_tokens=200), replicas=2)
    Scheduler(replace(nano.SETTINGS, kv_tokens=256), replicas=2)


def test_statistics_count_what_was_shared_and_computed(nano):
    scheduler = Scheduler(nano.SETTINGS, replicas=1)
    for slot in range(2):
        scheduler.open_context(slot, [1, 2, 3, 4, 5 + slot, 6], (slot, 0), 3, RULE)
    step = scheduler.schedule()
    assert [one.ids for one in scheduler.update(step, finished(step.decode, (8, 9)))] == [(8, 9)] * 2
    for slot in range(2):
        scheduler.pop_context(slot)
    stats = scheduler.clear()
    assert (stats.appended_tokens, stats.prompt_tokens, stats.generated_tokens) == (12, 12, 4)
    assert (stats.prefilled_tokens, stats.shared_tokens) == (5 + 1, 4)
    assert (stats.steps, stats.active_slots, stats.slots) == (1, 2, 4)
    assert stats.prefix_hit_rate == 0.5
    assert replace(stats, prefilled_tokens=13).prefix_hit_rate == 0, "preempted contexts are prefilled again"
