"""What the TPU compiler makes of a 7B decode step, without a TPU: the cache is neither copied nor moved."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from memsearcher_jax.model import qwen, sharding
from memsearcher_jax.model.cache import CACHE_AXES, Cache
from memsearcher_jax.model.config import MeshConfig, ModelConfig

pytestmark = pytest.mark.tpu_compile


@pytest.mark.parametrize(("sizes", "slots"), [((1, 1, 4), 64), ((2, 1, 2), 16)])
def test_decode_updates_a_long_cache_in_place(sizes, slots, monkeypatch):
    pytest.importorskip("libtpu", reason="no TPU compiler: install the extra 'tpu'")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    config = ModelConfig(param_dtype="bfloat16")
    mesh = sharding.make_mesh(MeshConfig(*sizes), topologies.get_topology_desc("v5e:2x2", platform="tpu").devices)

    def placed(shape, dtype, axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.named_sharding(mesh, axes))

    def decode(params, cache, ids_B1):
        hidden_B1D, cache = qwen.forward(
            params, config, ids_B1, cache.length_B[:, None], jnp.ones_like(ids_B1), cache, output="hidden"
        )
        return jnp.argmax(qwen.logits(qwen.output_table(params, config), hidden_B1D), axis=-1), cache

    with jax.set_mesh(mesh):
        params = jax.tree.map(lambda w: placed(w.shape, w.dtype, w.axes), qwen.declared(config))
        shapes = jax.eval_shape(lambda: Cache.empty(config, slots, 8192))
        cache = Cache(
            k_LBNKHP=placed(shapes.k_LBNKHP.shape, shapes.k_LBNKHP.dtype, CACHE_AXES),
            v_LBNKPH=placed(shapes.v_LBNKPH.shape, shapes.v_LBNKPH.dtype, CACHE_AXES),
            length_B=placed((slots,), jnp.int32, ("batch",)),
        )
        ids_B1 = placed((slots, 1), jnp.int32, ("batch", None))
        memory = jax.jit(decode, donate_argnums=1).lower(params, cache, ids_B1).compile().memory_analysis()
    cache_bytes = (shapes.k_LBNKHP.size + shapes.v_LBNKPH.size) * 2 // mesh.size
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 100
