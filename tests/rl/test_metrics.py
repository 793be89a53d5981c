"""Metrics of a rollout: slots, throughput, search latency and device memory."""

import time

import pytest

from memsearcher_jax.rl import metrics
from memsearcher_jax.rl.tool_executor import ToolExecutor, search_backend
from memsearcher_jax.sampling.scheduler import SamplerStats
from memsearcher_jax.types import Query, Search


def test_idle_slot_share_counts_inactive_slots_of_all_steps():
    stats = SamplerStats(generated_tokens=30, steps=4, active_slots=8 + 8 + 2 + 2, slots=4 * 8)
    result = metrics.rollout_metrics(metrics.RolloutStats(stats, 2.0))
    assert result["tokens_per_second"] == 15
    assert result["idle_slot_share"] == pytest.approx(12 / 32)
    assert SamplerStats().idle_slot_share == 0


def test_host_wait_is_the_mean_of_the_hosts():
    """Hosts add up their seconds, and what they waited."""
    stats = SamplerStats(seconds=10.0, host_wait=1.0) + SamplerStats(seconds=8.0, host_wait=3.5)
    assert metrics.rollout_metrics(metrics.RolloutStats(stats, 12.0))["host_wait"] == pytest.approx(12.0 * 4.5 / 18.0)
    assert SamplerStats().host_wait_share == 0


class SlowIndex:
    """Returns empty results after a delay; raises for a bad query."""

    def search(self, queries, top_n):
        time.sleep(0.2)
        if "bad" in queries:
            raise ValueError("bad")
        return [[] for _ in queries]


def completed(searches):
    results = []
    while searches.pending:
        searches.start()
        searches.wait()
        results += searches.completed()
    return dict(results)


def test_search_latency_is_measured_from_the_request_to_its_results():
    """The second search waits for the first call and for its own; a search that fails in a batch runs again alone."""
    searches = ToolExecutor({"": search_backend(SlowIndex(), 10.0)})
    searches.submit("a", Search((Query("one", 1),)))
    searches.start()
    searches.submit("b", Search((Query("two", 1),)))
    assert set(completed(searches)) == {"a", "b"}
    first, second = searches.latencies
    assert 0.2 <= first < second
    assert second >= 0.3
    searches = ToolExecutor({"": search_backend(SlowIndex(), 10.0)})
    searches.submit("a", Search((Query("bad", 1),)))
    searches.submit("b", Search((Query("two", 1),)))
    assert completed(searches)["a"][0].error == "ValueError: bad"
    assert len(searches.latencies) == 2 and min(searches.latencies) >= 0.3


def test_search_latency_has_a_mean_and_a_95th_percentile():
    latencies = (1.0,) * 99 + (101.0,)
    result = metrics.rollout_metrics(metrics.RolloutStats(seconds=1.0, search_latencies=latencies))
    assert (result["search_latency"], result["search_latency_p95"]) == (2.0, 1.0)
    assert "search_latency" not in metrics.rollout_metrics(metrics.RolloutStats(seconds=1.0))


def test_device_memory_is_the_maximum_over_devices_and_absent_on_cpus():
    stats = [
        {"bytes_in_use": 3_000_000_000, "peak_bytes_in_use": 5_000_000_000, "bytes_limit": 1},
        {"bytes_in_use": 4_000_000_000, "peak_bytes_in_use": 4_500_000_000, "bytes_limit": 1},
    ]
    assert metrics.device_memory(stats) == {"device_gb": 4.0, "device_peak_gb": 5.0}
    assert metrics.device_memory([None, None]) == {}
    assert metrics.device_memory([{"bytes_in_use": 1_000_000_000}, None]) == {"device_gb": 1.0}, "not all have a peak"
