"""The host state of one replica: what contexts share, who gives pages back, what is forgotten."""

from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsearcher_jax.sampling.config import SamplingConfig, SamplingParams
from memsearcher_jax.sampling.context import Context
from memsearcher_jax.sampling.replica import Replica

SETTINGS = SamplingConfig(
    slots=4, context_tokens=16, page_tokens=4, decode_steps_per_call=4, prefill_chunk=4, prefill_buckets=(8,)
)


@pytest.fixture
def replica():
    return Replica(SETTINGS, pages=8)


def open_context(replica: Replica, slot: int, ids: list[int], max_tokens: int = 1) -> Context:
    context = Context(slot, (slot, 0), SamplingParams(), SETTINGS.context_tokens)
    context.append(ids)
    context.generate(max_tokens, None)
    replica.contexts[slot] = context
    return context


def step(replica: Replica) -> list[tuple[int, int]]:
    """Prefills all that finds pages; the copies of pages."""
    replica.grow()
    copies = list(replica.admit())
    while replica.prefill_chunks(2):
        copies += replica.admit()
    return copies


def finish(replica: Replica, context: Context, ids: list[int]) -> None:
    """Appends sampled tokens and ends the generation."""
    context.append_sampled(np.array(ids), np.zeros(len(ids)))
    context.remaining = 0
    replica.mark_cached(context, context.length - 1)


def common(a, b) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


texts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=6)


@settings(deadline=None, max_examples=200)
@given(texts, st.booleans())
def test_a_new_context_shares_the_longest_common_beginning(contexts, released):
    """Of all contexts before it, also of those that are gone."""
    replica = Replica(SETTINGS, pages=40)
    for slot, ids in enumerate(contexts):
        context = open_context(replica, slot, ids)
        list(replica.admit())
        expected = max((common(ids[:-1], earlier[:-1]) for earlier in contexts[:slot]), default=0)
        assert context.cached == expected
        replica.prefill_chunks(9)
        if released:
            context.remaining = 0
            replica.remove(slot)


def test_contexts_with_one_beginning_hold_its_full_pages_once(replica):
    """The beginning is computed by the first; the others wait for it, then copy its last page."""
    beginning = [1, 2, 3, 4, 5, 6]
    contexts = [open_context(replica, slot, [*beginning, 7 + slot, 9]) for slot in range(3)]
    first = list(replica.admit())
    assert (first, contexts[1].pages) == ([], [])
    assert [(chunk.start, chunk.tokens) for chunk in replica.prefill_chunks(2)] == [(0, 4), (4, 3)]
    copies = list(replica.admit())
    assert [context.cached for context in contexts] == [7, 6, 6]
    assert {context.pages[0] for context in contexts} == {contexts[0].pages[0]}
    assert [target for _, target in copies] == [context.pages[1] for context in contexts[1:]]
    assert all(source in (contexts[0].pages[1], contexts[1].pages[1]) for source, _ in copies)
    assert replica.pool.free == 8 - 1 - 3
    assert replica.shared_tokens == 12


def test_the_youngest_gives_its_pages_back_and_is_computed_again():
    replica = Replica(SETTINGS, pages=7)
    old, young = (open_context(replica, slot, [slot + 1] * 9, max_tokens=7) for slot in range(2))
    step(replica)
    assert (len(old.pages), len(young.pages)) == (3, 3)
    for context in (old, young):
        context.append_sampled(np.array([5, 5, 5, 5]), np.zeros(4))
        context.remaining = 3
        replica.mark_cached(context, context.length - 1)
    step(replica)
    assert (len(old.pages), young.pages, replica.preempted) == (4, [], 1)
    finish(replica, old, [6, 6, 6])
    replica.remove(0)
    step(replica)
    # Its pages were free in the meantime and still have its tokens.
    assert (len(young.pages), young.uncached, replica.recomputed_tokens) == (4, 0, 0)


def test_an_idle_context_does_not_keep_others_from_running(replica):
    """Nothing runs and nobody is about to free a page, so the waiting context takes them from the idle ones."""
    small = Replica(SETTINGS, pages=4)
    idle = open_context(small, 0, [1] * 9)
    step(small)
    finish(small, idle, [2])
    waiting = open_context(small, 1, [3] * 14)
    step(small)
    assert (idle.pages, len(waiting.pages), small.preempted) == ([], 4, 1)
