"""The kernel that draws tokens, compiled for every TPU: rows of a whole vocabulary fit the memory of a core."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.planning.tpu_plan import find_topology
from memsearcher_jax.sampling.draw_kernel import draw

pytestmark = pytest.mark.tpu_compile


@pytest.mark.parametrize("vocab_size", [151_936, 152_064])
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_a_vocabulary_fits_a_core(topology, vocab_size, tpu_compiler):
    """A core of v4 has 16 MiB, in which the next rows find no room while one is drawn; the others hold both."""
    mesh = sharding.make_mesh(MeshConfig(1, 1, -1), find_topology(topology).devices)
    array = partial(jax.ShapeDtypeStruct, sharding=sharding.named_sharding(mesh, ()))
    slots = array((64,), jnp.float32)
    with jax.set_mesh(mesh):
        specs = jax.sharding.PartitionSpec()
        local = jax.shard_map(draw, in_specs=specs, out_specs=specs, check_vma=False)
        logits_1SV = array((1, 64, vocab_size), jnp.float32)
        lowered = jax.jit(local).lower(logits_1SV, slots, slots, array((64,), jnp.int32), slots)
    lowered.compile()
