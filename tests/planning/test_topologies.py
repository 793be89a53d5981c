"""The slices that plans know: their hosts and devices, as the compiler sees them, and the rates of their chips."""

import pytest

from memsearcher_jax.hosts.meshes import check_slices
from memsearcher_jax.launch.pod.tpu_slices import find_slice
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.planning.roofline import CHIPS
from memsearcher_jax.planning.tpu_plan import find_topology

# FLOPs per cycle: cores of a device, times matrix units of a core, times 2 for each of their cells.
FLOPS_PER_CYCLE = {
    "v4": 2 * 4 * 2 * 128**2,
    "v5e": 4 * 2 * 128**2,
    "v5p": 2 * 4 * 2 * 128**2,
    "v6e": 4 * 2 * 256**2,
    "tpu7x": 4 * 2 * 256**2,
}


@pytest.mark.parametrize("generation", CHIPS)
def test_the_clock_is_that_of_the_matrix_units(generation):
    chip = CHIPS[generation]
    assert chip.flops / chip.clock == pytest.approx(FLOPS_PER_CYCLE[generation], rel=0.01)


@pytest.mark.parametrize(("name", "reason"), [("h100:8", "h100:HOSTSxGPUS"), ("v4:2x2x2", "of v4 is not known")])
def test_slices_without_a_known_network_are_refused(name, reason):
    with pytest.raises(ValueError, match=f"--slices 2.*{reason}"):
        find_topology(name, slices=2)


@pytest.mark.tpu_compile
def test_two_slices_have_the_devices_of_both(tpu_compiler):
    topology = find_topology("v5e:2x4", slices=2)
    assert (len(topology.devices), topology.hosts) == (16, 2)
    check_slices(MeshConfig(2, -1, 1), topology.devices)
    check_slices(MeshConfig(1, -1, 1), find_topology("v5e:2x4").devices)
    with pytest.raises(ValueError, match=r"set --mesh\.data 2"):
        check_slices(MeshConfig(1, -1, 1), topology.devices)


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    "name",
    [
        "v4:2x2x4",
        "v5e:1x1",
        "v5e:2x4",
        "v5e:2x4-4t",
        "v5p:4x4x12",
        "v6e:4x8",
        "v6e:2x4-4t",
        "tpu7x:1x1x1",
        "tpu7x:2x2x2",
    ],
)
def test_a_slice_has_the_hosts_and_devices_of_the_cloud(name, tpu_compiler):
    """A chip of v4 is one device, one of tpu7x is two."""
    topology = find_topology(name)
    tpu_slice = find_slice(name)
    assert topology.hosts == tpu_slice.hosts
    assert topology.host_chips == tpu_slice.chips_per_host
    assert len(topology.devices) == tpu_slice.devices
