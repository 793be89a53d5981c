"""Tokens that any cache holds are not computed again, and the drawn tokens stay the same."""

import jax
import numpy as np
import pytest

from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig

SYSTEM = tuple(range(100, 112))


def prompt(problem: int, memory: int = 0) -> list[int]:
    """A common system prefix, a question for each problem, a memory for each turn."""
    draw = np.random.default_rng(problem)
    question = tuple(draw.integers(10, 250, 6).tolist())
    text = tuple(np.random.default_rng(1_000 + memory).integers(10, 250, 9 if memory else 0).tolist())
    return [*SYSTEM, problem, *question, 5, 6, *text, 8, 9]


HEAD = len(SYSTEM) + 1 + 6 + 2  # tokens before the memory


def turns(engine, numbers, rollouts, length=2):
    """Concurrent rollouts of problems, each of `length` turns in one slot; {(problem, rollout): contexts}."""
    waiting = [(problem, rollout) for problem in numbers for rollout in range(rollouts)]
    running, done = {}, {name: [] for name in waiting}
    while waiting or running:
        for slot in engine.scheduler.free_slots:
            if waiting and slot not in running:
                name = waiting.pop(0)
                running[slot] = name
                engine.scheduler.open_context(slot, prompt(name[0]), (name[0] * rollouts + name[1], 0), max_tokens=7)
        for generation in engine.step():
            name = running[generation.slot]
            done[name].append(engine.scheduler.pop_context(generation.slot))
            turn = len(done[name])
            if turn == length:
                del running[generation.slot]
            else:
                stream = (name[0] * rollouts + name[1], turn)
                engine.scheduler.open_context(
                    generation.slot, prompt(name[0], turn + 10 * name[1]), stream, max_tokens=7
                )
    return done


def test_rollouts_and_turns_share_their_common_prefix(params, engine, nano):
    """The system prefix is computed once, each question once; after that, only what is new in a prompt."""
    engine.start(params, nano.key())
    done = turns(engine, range(3), rollouts=2)
    for contexts in done.values():
        for recorded in contexts:
            nano.assert_recorded_logprobs(params, recorded)
    # Decoding feeds a prompt's last token, so the second rollout of a first turn has nothing left to prefill; a later
    # turn has a memory and the suffix. A question starts with its problem's number, so no other prefixes are shared.
    first = len(SYSTEM) + sum(len(prompt(problem)) - 1 - len(SYSTEM) for problem in range(3))
    later = 6 * (len(prompt(0, 1)) - 1 - HEAD)
    stats = engine.stop()
    assert stats.prefilled_tokens == first + later
    assert stats.prompt_tokens == sum(
        np.flatnonzero(recorded.sampled)[0] for contexts in done.values() for recorded in contexts
    )
    assert stats.prefix_hit_rate == pytest.approx(1 - (first + later) / stats.prompt_tokens)
    assert stats.prefix_hit_rate > 0.6


@pytest.mark.variant
def test_each_shard_of_a_mesh_shares_prefixes_among_its_slots(params, nano):
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=1, tensor=1), jax.devices()[:2])
    engine = nano.make_engine(nano.SETTINGS, mesh)
    placed = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
    engine.start(placed, nano.key())
    done = turns(engine, range(3), rollouts=3)
    for contexts in done.values():
        for recorded in contexts:
            nano.assert_recorded_logprobs(params, recorded)
    assert engine.stop().prefix_hit_rate > 0.5


def test_new_weights_get_a_new_prefix_cache(params, engine, nano):
    doubled = jax.tree.map(lambda x: 1.1 * x, params)
    for weights in (params, doubled):
        engine.start(weights, nano.key())
        engine.scheduler.open_context(0, prompt(0), (0, 0), max_tokens=6)
        nano.generate(engine, 0)
        nano.assert_recorded_logprobs(weights, engine.scheduler.pop_context(0))
    assert engine.stop().shared_tokens == 0
