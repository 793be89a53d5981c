"""`async_scheduling` draws the same tokens, and devices have their next call before the host handles the last one."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.sampling import engine as engine_module
from memsearcher_jax.sampling import scheduler as scheduler_module
from memsearcher_jax.sampling.decode import DecodeOutput
from memsearcher_jax.sampling.engine import Engine
from tests.support import NANO


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for number, recorded in ours.items():
        assert np.array_equal(recorded.ids, theirs[number].ids)
        assert np.array_equal(recorded.sampled, theirs[number].sampled)
        np.testing.assert_allclose(recorded.logprobs, theirs[number].logprobs, atol=1e-5)


def test_two_calls_in_flight_draw_the_same_tokens(params, engine, compilations, nano, fresh_programs):
    """Also with few pages, so that contexts are preempted while a call decodes them; nothing compiles."""
    settings = replace(nano.SETTINGS, async_scheduling="on", decode_batch_sizes=(1, 2), kv_tokens=160)
    ours = nano.run_conversations(engine, params, range(9))
    ahead = nano.make_engine(settings)
    ahead.warm_up(params)
    with compilations() as count:
        theirs = nano.run_conversations(ahead, params, range(9))
    stats = ahead.stop()
    assert count == [] and stats.preempted > 0
    assert_same(ours, theirs)
    assert stats.generated_tokens == sum(int(np.sum(recorded.sampled)) for recorded in theirs.values())


@pytest.mark.parametrize("engine_per_replica", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_on_several_devices(params, engine, compilations, engine_per_replica, nano, fresh_programs):
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=1, tensor=2), jax.devices()[:4])
    placed = jax.device_put(params, sharding.param_shardings(NANO, mesh))
    settings = replace(nano.SETTINGS, slots=8, async_scheduling="on", engine_per_replica=engine_per_replica)
    ahead = Engine(NANO, settings, (nano.STOP,), mesh)
    ahead.warm_up(placed)
    with compilations() as count:
        theirs = nano.run_conversations(ahead, placed, range(13))
    assert count == []
    assert_same(nano.run_conversations(engine, params, range(13)), theirs)


def run_with_stops(engine, params, nano):
    """Generations that end after the first even token, which the host finds; calls in flight then are in vain."""

    def first_even(ids):
        return next((count for count, id in enumerate(ids, start=1) if id % 2 == 0), None)

    engine.start(params, nano.key())
    for slot in range(4):
        engine.scheduler.open_context(slot, nano.prompt(slot), (slot, 0), 30, None, first_even)
    turns, done = dict.fromkeys(range(4), 0), {}
    while len(done) < 4:
        for generation in engine.step():
            turns[generation.slot] += 1
            if turns[generation.slot] == 4:
                done[generation.slot] = engine.scheduler.pop_context(generation.slot)
            else:
                engine.scheduler.extend_context(generation.slot, [51] * 13, 20, first_even, drop=generation.slot % 2)
    return done, engine.stop()


def test_a_stop_that_the_host_finds_drops_what_calls_in_flight_sample(params, engine, nano):
    ours, stats = run_with_stops(engine, params, nano)
    ahead = nano.make_engine(replace(nano.SETTINGS, async_scheduling="on"))
    theirs, other = run_with_stops(ahead, params, nano)
    assert_same(ours, theirs)
    assert (other.generated_tokens, other.appended_tokens) == (stats.generated_tokens, stats.appended_tokens)
    for recorded in theirs.values():
        nano.assert_recorded_logprobs(params, recorded)


def test_the_setting_says_who_is_ahead(nano):
    """On a CPU the devices and the host are one machine."""
    modes = {mode: nano.make_engine(replace(nano.SETTINGS, async_scheduling=mode)) for mode in ("auto", "on", "off")}
    assert {mode: engine.is_async for mode, engine in modes.items()} == {"auto": False, "on": True, "off": False}


class Clock:
    """A device whose calls take some simulated seconds, and a time that only waiting and `pass_` move."""

    def __init__(self):
        self.call_seconds = 10.0
        self.now = 100.0
        self.free_at = 0.0

    def monotonic(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds


class Runner:
    """Never ends a generation."""

    def __init__(self, clock, steps):
        self.clock = clock
        self.steps = steps
        self.calls = []  # (dispatched, begun) of each

    def run(self, step, params, root_key):
        begun = max(self.clock.now, self.clock.free_at)
        self.calls.append((self.clock.now, begun))
        self.clock.free_at = begun + self.clock.call_seconds
        A = len(step.decode.length_A)
        count_A = np.where(step.decode.remaining_A > 0, self.steps, 0)
        token_AJ = np.ones((A, self.steps), np.int32)
        remaining_A = step.decode.remaining_A - count_A
        ready = Ready(count_A, self.clock, self.clock.free_at)
        return DecodeOutput(token_AJ, token_AJ * 0.5, ready, remaining_A, np.ones(A, bool))

    def wait(self):
        pass

    def is_done(self, output):
        return self.clock.now >= output.count_A.ready_at


class Ready:
    def __init__(self, value, clock, ready_at):
        self.value, self.clock, self.ready_at = value, clock, ready_at

    def __array__(self, dtype=None, copy=None):
        self.clock.now = max(self.clock.now, self.ready_at)
        return self.value


@pytest.fixture
def timed_engine(monkeypatch, nano):
    """(mode) -> an engine on a simulated device, its clock and its runner."""

    def make(mode):
        clock = Clock()
        runner = Runner(clock, nano.SETTINGS.decode_steps_per_call)
        for module in (engine_module, scheduler_module):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
        monkeypatch.setattr(engine_module, "ModelRunner", lambda *arguments: runner)
        engine = nano.make_engine(replace(nano.SETTINGS, async_scheduling=mode))
        engine.start({}, nano.key())
        return engine, clock, runner

    return make


def test_the_time_in_which_devices_wait_for_the_host_is_measured(timed_engine):
    engine, clock, _ = timed_engine("off")
    clock.pass_(50.0)  # without work
    engine.scheduler.open_context(0, [1], (0, 0), 100)
    clock.pass_(2.0)
    for _ in range(3):
        engine.step()
        clock.pass_(3.0)
    stats = engine.stop()
    assert stats.host_wait == pytest.approx(2.0 + 2 * 3.0)
    assert stats.seconds == pytest.approx(50.0 + 2.0 + 3 * 13.0)


def test_devices_wait_only_for_a_host_that_takes_longer_than_a_call(timed_engine):
    engine, clock, runner = timed_engine("on")
    engine.scheduler.open_context(0, [1], (0, 0), 100)
    for _ in range(4):
        engine.step()
        clock.pass_(3.0)
    assert [begun for _, begun in runner.calls] == [100.0, 110.0, 120.0, 130.0, 140.0]
    assert all(dispatched < begun for dispatched, begun in runner.calls[1:])
    clock.pass_(20.0)  # the fifth call ends after 7 of them
    engine.step()
    assert engine.stop().host_wait == pytest.approx(13.0)


def test_a_host_that_handles_much_can_keep_the_devices_busy(timed_engine):
    engine, clock, runner = timed_engine("on")
    engine.scheduler.open_context(0, [1], (0, 0), 100)
    engine.step()
    for _ in range(20):  # one workflow after the other
        clock.pass_(1.0)
        engine.keep_busy()
    dispatched = len(runner.calls)
    assert dispatched == 3 and runner.calls[-1] == (120.0, 120.0), "two may be in flight, of which none was read"
    assert engine.seconds_left == 0.0
    engine.step()
    assert len(runner.calls) == dispatched


def test_a_host_that_waits_for_tools_is_not_late_for_long_when_calls_become_shorter(timed_engine):
    engine, clock, runner = timed_engine("on")
    engine.scheduler.open_context(0, [1], (0, 0), 100)
    engine.step()
    clock.call_seconds = 4.0
    for _ in range(12):  # as `RolloutDriver._patience`: tools may take all the time that the devices leave
        clock.pass_(engine.seconds_left)
        engine.step()
    distances = [later - earlier for (_, earlier), (_, later) in pairwise(runner.calls)]
    assert max(distances[2:6]) > 4.0, "the host did not know it"
    assert distances[-3:] == pytest.approx([4.0] * 3)
