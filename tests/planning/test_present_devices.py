"""What is read off the devices of a process."""

from dataclasses import dataclass, replace

import jax
import pytest

from memsearcher_jax.config import with_settings
from memsearcher_jax.launch.cli import load_preset
from memsearcher_jax.planning.present_devices import check_fits, present_topology, smallest_settings
from memsearcher_jax.planning.roofline import CHIPS, Topology, generation_of
from memsearcher_jax.planning.tpu_plan import find_topology


@dataclass(frozen=True)
class PresentDevice:
    device_kind: str
    bytes_limit: int
    coords: tuple[int, int, int] = (0, 0, 0)
    slice_index: int = 0

    def memory_stats(self):
        return {"bytes_limit": self.bytes_limit}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA H200", "h200"),
        ("cpu", None),
    ],
)
def test_a_generation_is_known_by_what_jax_calls_it(kind, name):
    assert generation_of(kind) == name


def test_devices_of_unknown_rates_have_no_topology():
    assert present_topology(jax.devices(), jax.local_devices()) is None


def test_a_device_that_others_use_offers_less():
    devices = [PresentDevice("TPU v5 lite", 10**9, (x, y, 0)) for x in (0, 1) for y in range(4)]
    topology = present_topology(devices, devices)
    assert (topology.name, topology.chips, topology.hosts, topology.slices) == ("v5e:2x4", 8, 1, 1)
    assert topology.chip.hbm_bytes == 10**9


def test_slices_and_hosts_of_gpus_are_counted():
    slices = [
        PresentDevice("TPU v6 lite", 10**12, (x, y, 0), index) for index in (0, 1) for x in (0, 1) for y in (0, 1)
    ]
    topology = present_topology(slices, slices[:4])
    assert (topology.name, topology.slices, topology.hosts) == ("v6e:2x2", 2, 2)
    assert topology.chip.hbm_bytes == CHIPS["v6e"].hbm_bytes
    cards = [PresentDevice("NVIDIA H100 80GB HBM3", 60 * 10**9)] * 8
    assert present_topology(cards, cards).name == "h100:8" and present_topology(cards, cards[:4]).name == "h100:2x4"


@pytest.mark.tpu_compile
@pytest.mark.parametrize("name", ["v4:2x2x4", "v5e:1x1", "v5e:2x4", "v6e:4x8", "tpu7x:2x2x2"])
def test_the_devices_of_a_slice_have_its_name(name, tpu_compiler):
    planned = find_topology(name)
    present = present_topology(planned.devices, planned.host_devices)
    assert present.name == name and present.chips == planned.chips and present.chip == planned.chip


def test_a_run_that_exceeds_its_devices_is_refused_with_flags_and_a_way_to_find_better_ones():
    """32 accumulation steps of 256 rows are eight rows of one device, in whose place that of the tests is."""
    one_chip = Topology.of("v5e", (1, 1), jax.devices()[:1], jax.devices()[:1])
    config = load_preset("qwen05b")
    saves_all = replace(config, model=replace(config.model, remat="none"))
    with pytest.raises(ValueError, match=r"^update needs at least \d\d\.\d\d GB, .*: try .*--suggest") as refused:
        check_fits(saves_all, one_chip)
    smaller = smallest_settings(saves_all, one_chip)
    assert smaller["training.grad_accum_steps"] == 256 and smaller["model.remat"] == "nothing_saveable"
    check_fits(with_settings(saves_all, smaller), one_chip)
    assert "try --model.remat nothing_saveable " in str(refused.value)
    with pytest.raises(ValueError, match=r"^nothing fits v5e:1x1 by its lower bound: try a larger slice, --model.lora"):
        smallest_settings(load_preset("qwen7b"), one_chip)
