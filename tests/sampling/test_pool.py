"""One engine for each copy of the weights samples what one for all does, and none waits for another."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.sampling.pool import Pool, make_sampler
from memsearcher_jax.testing import NANO


@pytest.fixture(scope="module")
def mesh():
    return sharding.make_mesh(MeshConfig(data=4, fsdp=1, tensor=2))


@pytest.fixture(scope="module")
def placed(params, mesh):
    return jax.device_put(params, sharding.param_shardings(NANO, mesh))


@pytest.fixture(scope="module")
def pool(mesh, nano):
    settings = replace(nano.SETTINGS, slots=8, apart=True, decode_rows=(1,))
    return make_sampler(NANO, settings, nano.WIDTHS, (nano.STOP,), mesh)


def test_a_pool_samples_what_one_engine_does(params, engine, pool, placed, nano):
    numbers = list(range(13))
    one, many = (nano.run_all(sampler, some, numbers) for sampler, some in ((engine, params), (pool, placed)))
    for number in numbers:
        assert many[number].ids == one[number].ids
        np.testing.assert_allclose(many[number].logprobs, one[number].logprobs, atol=1e-5)
    for count in ("standing_tokens", "prompt_tokens", "generated_tokens"):
        assert getattr(pool.counters, count) == getattr(engine.counters, count)
    assert pool.free == [0, 2, 4, 6, 1, 3, 5, 7], "what begins is spread over the engines"


def test_no_engine_waits_for_another(pool, placed, nano):
    """The first one's ticks go on while the second, whose generation ended, has nothing to do."""
    pool.start(placed, nano.key())
    pool.begin(0, nano.prompt(1), (1, 0), max_tokens=40)
    pool.begin(2, nano.prompt(2), (2, 0), max_tokens=1)
    ended = [spoken.slot for _ in range(2) for spoken in pool.tick()]
    assert ended == [2]
    pool.take(2)
    pool.tick()  # the first engine's second, which had begun before
    before = pool.counters.slots
    pool.tick()
    assert pool.counters.slots - before == 2, "one engine of two slots, and no other, was given work"
    pool.release()


def test_what_is_under_way_can_be_dropped(params, engine, pool, placed, nano):
    """The caller of a rollout may stop at any moment; what comes next is not touched by what ran."""
    pool.start(placed, nano.key())
    for slot in range(8):
        pool.begin(slot, nano.prompt(slot), (slot, 0), max_tokens=60)
    pool.tick()
    pool.release()
    assert sorted(pool.free) == list(range(8))
    assert not pool.speaking
    assert pool.tick() == []
    one, many = (nano.run_all(sampler, some, [3, 4]) for sampler, some in ((engine, params), (pool, placed)))
    assert [many[number].ids for number in (3, 4)] == [one[number].ids for number in (3, 4)]


def test_nothing_compiles_after_warm_up(pool, placed, compilations, nano):
    pool.warm_up(placed)
    pool.start(placed, nano.key())
    with compilations() as count:
        nano.run_all(pool, placed, range(9))
    assert count == []


def test_slots_divide_over_the_copies(mesh, nano):
    with pytest.raises(ValueError, match="6 slots do not divide over 4 copies"):
        Pool(NANO, replace(nano.SETTINGS, slots=6), nano.WIDTHS, (), mesh)
