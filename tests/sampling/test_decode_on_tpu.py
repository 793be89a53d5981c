"""The samplers compiled for TPUs, without one: operations per token, and memory besides weights and cache."""

import re
from dataclasses import replace

import pytest
from jax.experimental import topologies

from memsearcher_jax.hosts.meshes import make_meshes
from memsearcher_jax.launch.cli import load_preset
from memsearcher_jax.model import lora, sharding
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.planning.hlo import count_work
from memsearcher_jax.sampling import model_runner
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.training.trainer import merge_program

pytestmark = pytest.mark.tpu_compile
GB = 1e9
MAX_OPERATIONS = 1_200  # per decoded token
SMALL = {"vocab_size": 151_936, "tie_embeddings": True}
MODELS = {
    "7B": ModelConfig(),
    "3B": ModelConfig(**SMALL, embed_size=2_048, ffn_size=11_008, layers=36, heads=16, kv_heads=2),
    "0.5B": ModelConfig(**SMALL, embed_size=896, ffn_size=4_864, layers=24, heads=14, kv_heads=2, head_size=64),
}


@pytest.fixture
def lower(tpu_compiler):
    """(model, settings, topology) -> (name, lowered program) of the sampler of a host."""

    def lower(model, settings, topology):
        devices = topologies.get_topology_desc(topology, platform="tpu").devices
        mesh = sharding.make_mesh(MeshConfig(-1, 1, settings.tensor), devices)
        return model_runner.lower_programs(MODELS[model], settings, mesh)

    return lower


def assert_decodes_within_the_limits(compiled, settings):
    """Few operations per token, no loops but those over tokens and layers, and little temporary memory."""
    text = compiled.as_text()
    steps = settings.decode_steps_per_call
    assert count_work(text, unknown_trips=steps).operations <= MAX_OPERATIONS * steps
    assert text.count(" while(") == 2
    assert compiled.memory_analysis().temp_size_in_bytes <= 0.1 * GB


def test_every_program_of_a_7b_sampler_fits_four_small_chips(lower):
    """64 slots of 8,192 tokens on v5e 2x2: 3.8 GB of weights and 7.5 GB of cache on each chip of 16 GB."""
    settings, names = SamplingConfig(slots=64, tensor=4), []
    for name, lowered in lower("7B", settings, "v5e:2x2"):
        compiled = lowered.compile()
        memory = compiled.memory_analysis()
        assert memory.temp_size_in_bytes <= 0.1 * GB, name
        assert memory.peak_memory_in_bytes <= 11.5 * GB, name
        # The donated cache of all layers is updated in place.
        assert memory.alias_size_in_bytes >= 7.5 * GB, name
        if name == "decode":
            assert_decodes_within_the_limits(compiled, settings)
        names.append(name.split(",")[0])
    assert names == ["decode", "prefill", "prefill", "copy_pages"]


@pytest.mark.parametrize(
    ("model", "topology", "settings"),
    [
        ("7B", "v6e:2x2", SamplingConfig(slots=256, tensor=4, kv_tokens=64 * 8_192, decode_steps_per_call=16)),
        ("7B", "v6e:2x2", SamplingConfig(slots=64, tensor=4, weights="int8")),
        ("3B", "v5e:2x2", SamplingConfig(slots=64, tensor=2)),
        ("0.5B", "v5e:2x2", SamplingConfig(slots=64, tensor=1)),
    ],
)
def test_a_decoded_token_takes_few_operations(model, topology, settings, lower):
    """256 slots of the 7B sampler have the cache of 64 full ones: 7.5 GB on each chip."""
    name, lowered = next(lower(model, settings, topology))
    assert name == "decode"
    compiled = lowered.compile()
    assert_decodes_within_the_limits(compiled, settings)
    memory = compiled.memory_analysis()
    if model == "7B":
        assert memory.alias_size_in_bytes <= 7.53 * GB
    if settings.weights == "int8":
        # A product reads the values as they are stored: of no projection a copy in bfloat16 is written.
        assert memory.argument_size_in_bytes - memory.alias_size_in_bytes <= 2.2 * GB
        assert not re.findall(r"^  %\S+ = bf16\[(?:1,)?(?:4736,3584|3584,4736)\]", compiled.as_text(), re.MULTILINE)


def test_weights_are_published_one_after_another(lower):
    """Those of 7B with adapters, on the eight chips of a host: gathered together, they take 15.3 GB of each."""
    devices = topologies.get_topology_desc("v5e:2x4", "tpu", chips_per_host_bounds=(2, 4, 1)).devices
    config = load_preset("qwen7b")
    meshes = make_meshes(config, devices, devices)
    program = sharding.publish_program(config.model, meshes.local, tuple(devices), "bfloat16")
    merged = sharding.abstract_params(config.model, meshes.train, "bfloat16")
    memory = program.lower(merged).compile().memory_analysis()
    assert memory.peak_memory_in_bytes <= 10.6 * GB


def test_one_chip_merges_adapters_into_what_the_sampler_reads(tpu_compiler):
    """LoRA of 3B on a v5e-1: a second copy of the merged weights would need 18.9 GB."""
    devices = topologies.get_topology_desc("v5e:1x1", "tpu", chips_per_host_bounds=(1, 1, 1)).devices
    config = load_preset("qwen3b")
    model = replace(config.model, lora_rank=16)
    config = replace(config, model=model, sampling=replace(config.sampling, tensor=1))
    meshes = make_meshes(config, devices, devices)
    base = sharding.abstract_params(model, meshes.train, "bfloat16")
    assert sharding.is_in_sampler_form(base, model, meshes.local, tuple(devices), "bfloat16")
    adapters = sharding.abstract_arrays(lora.adapter_specs(model), meshes.train)
    memory = merge_program(model, meshes.train).lower(base, adapters).compile().memory_analysis()
    assert memory.peak_memory_in_bytes <= 12.6 * GB
