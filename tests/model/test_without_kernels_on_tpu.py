"""model.attention and sampling.attention "xla": programs for TPUs, compiled without one, that hold no Pallas kernel."""

from dataclasses import replace

import jax
import pytest
from jax.experimental import topologies

from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.planning.tpu_plan import _abstract_batch
from memsearcher_jax.sampling import model_runner
from memsearcher_jax.sampling.config import SamplingConfig
from memsearcher_jax.training import update
from memsearcher_jax.training.config import TrainingConfig
from memsearcher_jax.training.trainer import update_program

pytestmark = pytest.mark.tpu_compile
MODEL = ModelConfig(vocab_size=1_024, embed_size=512, ffn_size=1_024, layers=2, heads=8, kv_heads=2, head_size=128)
KERNEL = "tpu_custom_call"


@pytest.fixture
def devices(tpu_compiler):
    return topologies.get_topology_desc("v5e:2x2", platform="tpu").devices


@pytest.mark.parametrize("kv", ["compute_dtype", "int8"])
@pytest.mark.parametrize("attention", ["auto", "xla"])
def test_the_sampler(attention, kv, devices):
    """The cache is donated, and updated in place, in both ways."""
    settings = SamplingConfig(
        slots=8, tensor=2, kv=kv, context_tokens=1_024, decode_steps_per_call=4, attention=attention
    )
    mesh = sharding.make_mesh(MeshConfig(-1, 1, settings.tensor), devices)
    pools = jax.tree.leaves(model_runner.abstract_cache(MODEL, settings, mesh))
    pool_bytes = sum(x.dtype.itemsize * x.size for x in pools) / len(devices)
    for name, lowered in model_runner.lower_programs(MODEL, settings, mesh):
        compiled = lowered.compile()
        has_kernels = attention == "auto" and name != "copy_pages"
        assert (KERNEL in compiled.as_text()) == has_kernels, name
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= pool_bytes, name
        assert memory.temp_size_in_bytes < 2 * pool_bytes, name


@pytest.mark.parametrize("attention", ["auto", "xla"])
def test_the_update(attention, devices):
    mesh = sharding.make_mesh(MeshConfig(1, 2, 2), devices)
    training = TrainingConfig(minibatch_rows=4, seq_len=1_024, logit_chunk=256)
    model = sharding.select_attention(replace(MODEL, attention=attention), mesh, training.seq_len)
    state = update.abstract_state(model, update.make_optimizer(training), mesh)
    step = update_program(model, mesh, "grpo", 1.0, training)
    with jax.set_mesh(mesh):
        lowered = step.lower(state, _abstract_batch(training, mesh, resolved=True), None)
    assert (KERNEL in lowered.as_text()) == (attention == "auto")
    lowered.compile()
