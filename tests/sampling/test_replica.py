"""The host state of one replica: what contexts share, who gives pages back, what is forgotten."""

from itertools import takewhile
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsearcher_jax.sampling import pages
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


def common(a, b) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


texts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=6)


@settings(deadline=None, max_examples=200)
@given(texts, st.booleans(), st.integers(1, 5))
def test_a_new_context_shares_the_longest_common_beginning(contexts, released, block):
    """Of all contexts before it, also of those that are gone."""
    with mock.patch.object(pages, "BLOCK", block):
        check_sharing(contexts, released)


def check_sharing(contexts, released):
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
