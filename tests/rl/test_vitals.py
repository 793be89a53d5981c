"""What a step tells of itself beside its rewards."""

import time

import pytest

from memsearcher_jax.agent.types import Find, Query
from memsearcher_jax.rl import vitals
from memsearcher_jax.rl.searches import SearchDesk
from memsearcher_jax.sampling.ledger import Counters


def test_idle_slots_are_those_that_a_tick_computes_for_nothing():
    counters = Counters(generated_tokens=30, ticks=4, speaking_slots=8 + 8 + 2 + 2, slots=4 * 8)
    told = vitals.sampler_numbers(counters, 2.0)
    assert told["tokens_per_second"] == 15
    assert told["idle_slot_share"] == pytest.approx(12 / 32)
    assert Counters().idle_share == 0


class SlowIndex:
    """Finds nothing, in its time; whoever asks for what is bad gets an error."""

    def search(self, queries, top_n):
        time.sleep(0.2)
        if "bad" in queries:
            raise ValueError("bad")
        return [[] for _ in queries]


def answered(desk):
    found = []
    while desk.asking:
        desk.start()
        desk.wait()
        found += desk.answers()
    return dict(found)


def test_a_search_counts_from_the_question_to_the_answer():
    """The second waits for the first's call and for its own; a bad one is asked twice."""
    waited = []
    desk = SearchDesk(SlowIndex(), 10.0, waited)
    desk.ask("a", Find((Query("one", 1),)))
    desk.start()
    desk.ask("b", Find((Query("two", 1),)))
    assert set(answered(desk)) == {"a", "b"}
    first, second = waited
    assert 0.2 <= first < second
    assert second >= 0.4
    waited.clear()
    desk.ask("a", Find((Query("bad", 1),)))
    desk.ask("b", Find((Query("two", 1),)))
    assert answered(desk)["a"][0].error == "ValueError: bad"
    assert len(waited) == 2 and min(waited) >= 0.4


def test_the_mean_and_what_95_of_100_stay_below():
    assert vitals.search_numbers([1.0] * 99 + [101.0]) == {"search_seconds": 2.0, "search_seconds_95": 1.0}
    assert vitals.search_numbers([]) == {}


def test_memory_is_that_of_the_fullest_device_and_nothing_on_a_cpu():
    stats = [
        {"bytes_in_use": 3_000_000_000, "peak_bytes_in_use": 5_000_000_000, "bytes_limit": 1},
        {"bytes_in_use": 4_000_000_000, "peak_bytes_in_use": 4_500_000_000, "bytes_limit": 1},
    ]
    assert vitals.memory_numbers(stats) == {"device_gb": 4.0, "device_peak_gb": 5.0}
    assert vitals.memory_numbers([None, None]) == {}
