"""What one cache holds already is never computed again, and nobody can tell by the tokens."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.sampling.buffer import PromptIds
from memsearcher_jax.sampling.ledger import Ledger

SYSTEM = tuple(range(100, 112))


def prompt(problem: int, memory: int = 0) -> PromptIds:
    """The same system prefix for all, a question of the problem's own, a memory of the turn's."""
    draw = np.random.default_rng(problem)
    question = tuple(draw.integers(10, 250, 6).tolist())
    text = tuple(np.random.default_rng(1_000 + memory).integers(10, 250, 9 if memory else 0).tolist())
    return PromptIds(SYSTEM, (problem, *question), (5, 6), text, (8, 9))


def head(problem: int) -> int:
    """Tokens before the memory."""
    return sum(map(len, prompt(problem).parts[:3]))


def turns(engine, numbers, rollouts, length=2):
    """Rollouts of some problems side by side, each of so many turns in one slot; {(problem, rollout): contexts}."""
    waiting = [(problem, rollout) for problem in numbers for rollout in range(rollouts)]
    running, done = {}, {name: [] for name in waiting}
    while waiting or running:
        for slot in engine.free:
            if waiting and slot not in running:
                name = waiting.pop(0)
                running[slot] = name
                engine.begin(slot, prompt(name[0]), (name[0] * rollouts + name[1], 0), max_tokens=7)
        for spoken in engine.tick():
            name = running[spoken.slot]
            done[name].append(engine.take(spoken.slot))
            turn = len(done[name])
            if turn == length:
                del running[spoken.slot]
            else:
                stream = (name[0] * rollouts + name[1], turn)
                engine.begin(spoken.slot, prompt(name[0], turn + 10 * name[1]), stream, max_tokens=7)
    return done


def test_rollouts_and_turns_share_what_they_begin_with(params, engine, nano):
    """The system prefix is computed once, each question once; after that, only what is new in a prompt."""
    engine.start(params, nano.key())
    done = turns(engine, range(3), rollouts=2)
    for contexts in done.values():
        for recorded in contexts:
            nano.assert_recorded_truly(params, recorded)
    # Decode feeds a prompt's last token, so that the second rollout of a first turn has nothing left to compute; a
    # later turn has a memory and the suffix. (A question starts with its problem's number: no accidental beginnings.)
    first = len(SYSTEM) + sum(len(prompt(problem)) - 1 - len(SYSTEM) for problem in range(3))
    later = 6 * (len(prompt(0, 1)) - 1 - head(0))
    assert engine.counters.prefilled_tokens == first + later
    assert engine.counters.prompt_tokens == sum(
        np.flatnonzero(recorded.sampled)[0] for contexts in done.values() for recorded in contexts
    )
    assert engine.counters.reused_share == pytest.approx(1 - (first + later) / engine.counters.prompt_tokens)
    assert engine.counters.reused_share > 0.6


def test_new_weights_compute_the_prefix_again(params, engine, nano):
    engine.start(params, nano.key())
    turns(engine, [1], rollouts=1)
    once = engine.counters.prefilled_tokens
    engine.start(params, nano.key())
    turns(engine, [1], rollouts=1)
    assert engine.counters.prefilled_tokens == once
    assert once >= len(SYSTEM)


def test_a_cache_is_copied_before_its_owner_opens_another_context(params, engine, nano):
    """Between two ticks slot 0 goes on to another question while slots 1 and 2 want the one that it held."""
    engine.start(params, nano.key())
    engine.begin(0, prompt(1), (0, 0), max_tokens=3)
    nano.speak(engine, 0)
    engine.take(0)
    engine.begin(1, prompt(1, memory=1), (1, 0), max_tokens=3)
    engine.begin(0, prompt(2), (2, 0), max_tokens=3)
    engine.begin(2, prompt(1, memory=2), (3, 0), max_tokens=3)
    engine.begin(3, prompt(2, memory=3), (4, 0), max_tokens=3)
    while engine.speaking:
        engine.tick()
    for slot in range(4):
        nano.assert_recorded_truly(params, engine.take(slot))


def test_parts_of_a_mesh_share_among_their_own_slots(params, nano):
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=1, tensor=1), jax.devices()[:2])
    engine = nano.make_engine(nano.SETTINGS, mesh)
    placed = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
    engine.start(placed, nano.key())
    done = turns(engine, range(3), rollouts=3)
    for contexts in done.values():
        for recorded in contexts:
            nano.assert_recorded_truly(params, recorded)
    assert engine.counters.reused_share > 0.5
    with pytest.raises(ValueError, match="3 slots do not divide over 2 copies"):
        nano.make_engine(replace(nano.SETTINGS, slots=3), mesh)


def test_contexts_with_another_prefix_stand_beside_those_that_share_it(params, engine, nano):
    """The first prompt's prefix is shared; another is cached with its context, as is a prompt that ends with it."""
    engine.start(params, nano.key())
    other = PromptIds(tuple(range(30, 40)), (3, 4), (5, 6), (), (8, 9))
    bare = PromptIds(SYSTEM, (), (), (), ())
    prompts = [prompt(0), other, bare, prompt(1)]
    for slot, one in enumerate(prompts):
        engine.begin(slot, one, (slot, 0), max_tokens=6)
    while engine.speaking:
        engine.tick()
    for slot in range(4):
        recorded = engine.take(slot)
        assert recorded.ids[: len(prompts[slot])] == sum(prompts[slot].parts, ())
        nano.assert_recorded_truly(params, recorded)
    # Slots change sides: what their caches hold then belongs to nobody.
    for slot, one in enumerate(prompts[::-1]):
        engine.begin(slot, one, (slot, 1), max_tokens=6)
    while engine.speaking:
        engine.tick()
    for slot in range(4):
        nano.assert_recorded_truly(params, engine.take(slot))


def test_new_weights_get_a_prefix_of_their_own(params, engine, nano):
    doubled = jax.tree.map(lambda x: 1.1 * x, params)
    for weights in (params, doubled):
        engine.start(weights, nano.key())
        engine.begin(0, prompt(0), (0, 0), max_tokens=6)
        nano.speak(engine, 0)
        nano.assert_recorded_truly(weights, engine.take(0))


texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=3, max_size=3)


@settings(deadline=None, max_examples=100)
@given(texts, st.lists(st.integers(0, 5), min_size=3, max_size=3), st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_the_best_source_holds_the_longest_beginning(rows, cached, wanted):
    ledger = Ledger(3, 8)
    for slot, (ids, count) in enumerate(zip(rows, cached, strict=True)):
        ledger.open(slot, np.array(ids), min(count, len(ids)), follows=False)
        ledger.promised_S[slot] = ledger.cached_S[slot]

    def common(slot):
        count = 0
        while count < min(ledger.cached_S[slot], len(wanted)) and rows[slot][count] == wanted[count]:
            count += 1
        return count

    source, tokens = ledger.best_source(1, np.array(wanted), 0, range(3))
    assert tokens == max(map(common, range(3))) == common(source)
    assert source == 1 or common(1) < tokens
