"""Attention of 7B, compiled for TPUs without one: a cache that is updated in place, and training rows."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from memsearcher_jax.ops.attention import Visible
from memsearcher_jax.ops.splash_attention import splash_attention

pytestmark = pytest.mark.tpu_compile


@pytest.mark.parametrize("generation", ["v5e", "v6e"])
def test_training_attention_needs_no_memory_for_scores_or_masks(generation, tpu_compiler):
    """Forward and backward of one row: the outputs and the parts of dq, as without a shared prefix."""
    device = topologies.get_topology_desc(f"{generation}:2x2", platform="tpu").devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    row = [((1, n, 8_192, 128), jnp.bfloat16) for n in (28, 4, 4)] + [((1, 8_192), jnp.int32), ((1,), jnp.int32)]
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in row]

    def loss(q_BNTH, k_BKTH, v_BKTH, offset_BT, prefix_B):
        return jnp.sum(splash_attention(q_BNTH, k_BKTH, v_BKTH, Visible(offset_BT, prefix_B)).astype(jnp.float32))

    memory = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.55e9  # 0.47 with libtpu 0.0.42, 0.54 with 0.0.50; the scores alone have 7.5
