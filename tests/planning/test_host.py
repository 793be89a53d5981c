"""Seconds, memory and disk of a host, against arithmetic by hand."""

from dataclasses import replace

import pytest

from memsearcher_jax.launch.cli import load_preset
from memsearcher_jax.planning import roofline
from memsearcher_jax.planning.host import HostTime, host_space, host_time
from memsearcher_jax.planning.roofline import Workload
from memsearcher_jax.planning.tpu_plan import ResidentMemory, count_weights

V5E_8 = roofline.Topology.of("v5e", (2, 4), range(8), range(8))
V6E_32 = roofline.Topology.of("v6e", (4, 8), range(32), range(4))
WORKLOAD = Workload(host_ms=10, between_ms=4, packing_ms=1)
GB = 1e9


@pytest.fixture(scope="module")
def three_b():
    return load_preset("qwen3b")


def test_a_host_rolls_out_its_share_and_packs_the_contexts_of_all(three_b):
    """1,280 trajectories: 160 on each of eight hosts."""
    time = host_time(three_b, WORKLOAD, V6E_32)
    assert time.rollout == pytest.approx(160 * 0.010)
    assert time.between == pytest.approx(160 * 0.004 + 1_280 * 0.001)
    assert host_time(three_b, WORKLOAD, V5E_8).rollout == pytest.approx(12.8)


def test_devices_wait_for_what_their_calls_do_not_hide(three_b):
    time = HostTime(rollout=3.0, between=0.5, overlaps=True)
    assert (time.hidden(10.0), time.waited(10.0)) == (3.0, 0.5)
    assert (time.hidden(2.0), time.waited(2.0)) == (2.0, 1.5)
    in_turn = replace(three_b, sampling=replace(three_b.sampling, async_scheduling="off"))
    time = host_time(in_turn, WORKLOAD, V6E_32)
    assert time.hidden(10.0) == 0 and time.waited(10.0) == pytest.approx(1.6 + 1.92)


def space_of(config, topology, workload=WORKLOAD, **memory):
    sizes = {"base": 0, "training": 0, "gradients": 0, "sampler_params": 0, "slots": 0, "rollout": 0}
    resident = ResidentMemory(**({"state": 0, "reference": 0} | sizes | memory))
    return host_space(config, workload, topology, resident, count_weights(config.model))


def test_a_host_holds_a_copy_of_the_state_and_the_index_of_wikipedia(three_b):
    """A session of eight v5e has 384 GB of memory, and a root disk has no room for four checkpoints of 37 GB."""
    space = space_of(three_b, V5E_8, state=int(4.6 * GB))
    assert space.memory["copy of the train state"] == pytest.approx(8 * 4.6 * GB)
    assert space.memory["index"] == pytest.approx(35 * GB, rel=0.01)
    assert space.disk["index"] == pytest.approx(52 * GB, rel=0.01)
    assert space.disk["weights"] == pytest.approx(2 * 3.09e9, rel=0.01)
    assert space.disk["4 checkpoints"] == pytest.approx(4 * 8 * 4.6 * GB)
    assert space.memory_limit == 384 * GB and space.disk_limit == 100 * GB
    (line,) = space.excess
    assert line.startswith("host disk: 205 GB are more than the 100 of a root disk: attach a data disk")
    assert "--out gs://BUCKET/FOLDER" in line and "rl.keep_checkpoints" in line


@pytest.mark.parametrize(
    ("generation", "shape", "devices", "memory_gb"),
    [
        ("v5e", (1, 1), 1, 48),
        ("v5e", (2, 2), 4, 192),
        ("v6e", (1, 1), 1, 172),
        ("v6e", (2, 2), 4, 720),
        ("v6e", (2, 4), 8, 1_440),
        ("v5p", (2, 2, 1), 4, 448),
        ("tpu7x", (2, 2, 1), 8, 960),
        ("h200", (8,), 8, None),
    ],
)
def test_the_memory_of_a_host_is_that_of_its_machine(generation, shape, devices, memory_gb, three_b):
    topology = roofline.Topology.of(generation, shape, range(devices), range(devices))
    space = space_of(three_b, topology, state=1)
    assert space.memory_limit == (memory_gb * GB if memory_gb else None)
    assert (space.disk_limit is None) == (generation == "h200")


def test_an_index_and_a_state_that_exceed_the_memory_name_ways_out(three_b):
    one_chip = roofline.Topology.of("v5e", (1, 1), range(1), range(1))
    (memory, _) = space_of(three_b, one_chip, state=14 * 10**9).excess
    assert memory.startswith("host memory: 49 GB are more than the 48 of the VM") and "retrieval.url" in memory
    small = space_of(three_b, one_chip, replace(WORKLOAD, passages=66_000.0), state=int(5.9 * GB))
    assert small.excess == []


def test_hosts_of_a_slice_write_checkpoints_to_a_folder_that_they_share(three_b):
    assert set(space_of(three_b, V6E_32, state=1).disk) == {"weights", "index"}


def test_an_offloaded_reference_is_in_the_memory_of_the_host(three_b):
    offloaded = replace(three_b, training=replace(three_b.training, offload_reference=True))
    assert space_of(offloaded, V5E_8, reference=int(0.8 * GB)).memory["reference"] == pytest.approx(6.4 * GB)
    assert "reference" not in space_of(three_b, V5E_8, reference=1).memory
