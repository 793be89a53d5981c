"""`engine_per_replica` draws the same tokens as one program for all replicas, and no replica waits for another."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.sampling.engine import Engine
from tests.support import NANO


@pytest.fixture(scope="module")
def mesh():
    return sharding.make_mesh(MeshConfig(data=2, fsdp=1, tensor=2), jax.devices()[:4])


@pytest.fixture(scope="module")
def placed(params, mesh):
    return jax.device_put(params, sharding.param_shardings(NANO, mesh))


@pytest.fixture(scope="module")
def replicated(mesh, nano):
    settings = replace(nano.SETTINGS, slots=8, engine_per_replica=True, decode_batch_sizes=(1,))
    return Engine(NANO, settings, (nano.STOP,), mesh)


@pytest.mark.variant
def test_replicas_draw_the_same_tokens_as_one_engine(params, engine, replicated, placed, compilations, nano):
    """Nothing compiles after `warm_up`."""
    numbers = list(range(13))
    one = nano.run_conversations(engine, params, numbers)
    replicated.warm_up(placed)
    with compilations() as count:
        many = nano.run_conversations(replicated, placed, numbers)
    assert count == []
    for number in numbers:
        assert many[number].ids.tolist() == one[number].ids.tolist()
        np.testing.assert_allclose(many[number].logprobs, one[number].logprobs, atol=1e-5)
    stats, other = engine.stop(), replicated.stop()
    for count in ("appended_tokens", "prompt_tokens", "generated_tokens"):
        assert getattr(other, count) == getattr(stats, count)
    assert replicated.scheduler.free_slots == [0, 4, 1, 5, 2, 6, 3, 7], "new contexts are spread over the replicas"


def test_no_replica_waits_for_another(replicated, placed, nano):
    """The first replica keeps decoding while the second, whose generation ended, is idle."""
    replicated.start(placed, nano.key())
    replicated.scheduler.open_context(0, nano.prompt(1), (1, 0), max_tokens=40)
    replicated.scheduler.open_context(4, nano.prompt(2), (2, 0), max_tokens=1)
    ended = [generation.slot for _ in range(2) for generation in replicated.step()]
    assert ended == [4]
    replicated.scheduler.pop_context(4)
    replicated.step()  # returns the first replica's second call
    replicated.step()
    assert replicated.stop().slots == (3 + 1) * 4, (
        "three calls of the first replica and one of the second, four slots each"
    )


def test_calls_in_flight_can_be_dropped(params, engine, replicated, placed, nano):
    """A rollout may stop at any moment; the next one is not affected."""
    replicated.start(placed, nano.key())
    for slot in range(8):
        replicated.scheduler.open_context(slot, nano.prompt(slot), (slot, 0), max_tokens=60)
    replicated.step()
    replicated.stop()
    assert sorted(replicated.scheduler.free_slots) == list(range(8))
    assert not replicated.scheduler.active
    assert replicated.step() == []
    one, many = (
        nano.run_conversations(target, weights, [3, 4]) for target, weights in ((engine, params), (replicated, placed))
    )
    for number in (3, 4):
        assert many[number].ids.tolist() == one[number].ids.tolist()
