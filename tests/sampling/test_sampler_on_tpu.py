"""What the TPU compiler makes of the 7B sampler, without a TPU: it fits a v5e with almost nothing beside the cache."""

import pytest
from jax.experimental import topologies

from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.sampling import plan
from memsearcher_jax.sampling.config import SamplingConfig

pytestmark = pytest.mark.tpu_compile
GB = 1e9


def test_every_program_of_a_7b_sampler_fits_four_small_chips(monkeypatch):
    """64 slots of 8,192 tokens on v5e 2x2: 3.8 GB of weights and 7.5 GB of cache on each chip of 16 GB."""
    pytest.importorskip("libtpu", reason="no TPU compiler: install the extra 'tpu'")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    mesh = sharding.make_mesh(MeshConfig(1, 1, 4), topologies.get_topology_desc("v5e:2x2", platform="tpu").devices)
    names = []
    for name, lowered in plan.lowered_programs(ModelConfig(), SamplingConfig(slots=64, tensor=4), 512, mesh):
        memory = lowered.compile().memory_analysis()
        assert memory.temp_size_in_bytes <= 0.1 * GB, name
        assert memory.peak_memory_in_bytes <= 11.5 * GB, name
        # Donated, and so written in place: the cache of all layers.
        assert memory.alias_size_in_bytes >= 7.5 * GB, name
        names.append(name.split(",")[0])
    assert names == ["decode", "prefill", "prefill", "prefix", "share"]
