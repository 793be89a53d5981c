"""A checksum depends on the content alone, and every single change changes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from memsearcher_jax.model import sharding
from memsearcher_jax.model.config import MeshConfig
from memsearcher_jax.training.checksums import checksums, slice_checksum

X = np.random.default_rng(0).normal(size=(4, 8, 6)).astype(np.float32)


@pytest.mark.parametrize("x", [X, X.astype(jnp.bfloat16)])
def test_every_mesh_gives_the_same_checksum_and_slices_add_up(x):
    expected = sum(slice_checksum(x[i], i * x[i].size) for i in range(len(x))) % 2**32
    assert checksums({"x": x, "number": np.int32(7)})["x"] == expected
    mesh = sharding.make_mesh(MeshConfig(2, 2, 2))
    for spec in (PartitionSpec("data", "fsdp"), PartitionSpec(None, ("fsdp", "data"), "tensor")):
        assert checksums({"x": jax.device_put(x, NamedSharding(mesh, spec))}) == {"x": expected}


@given(st.integers(0, X.size - 1), st.integers(0, 31))
def test_every_flipped_bit_changes_the_checksum(index, bit):
    changed = X.copy()
    changed.reshape(-1).view(np.uint32)[index] ^= np.uint32(1) << np.uint32(bit)
    assert slice_checksum(changed, 0) != slice_checksum(X, 0)
