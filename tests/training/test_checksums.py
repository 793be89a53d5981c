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
from memsearcher_jax.training.checksums import HOST_CHUNK, checksums, host_sums, to_hex

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 8, 6)).astype(np.float32)


@pytest.mark.parametrize("x", [X, X.astype(jnp.bfloat16), np.int32(7), np.zeros((0, 3), np.float32)])
def test_host_and_every_mesh_give_the_same_checksum(x):
    expected = to_hex(*host_sums(np.asarray(x), 0))
    assert checksums({"x": jnp.asarray(x)}) == {"x": expected}
    if x.ndim == 3:
        mesh = sharding.make_mesh(MeshConfig(2, 2, 2))
        for spec in (PartitionSpec("data", "fsdp"), PartitionSpec(None, ("fsdp", "data"), "tensor")):
            placed = jax.device_put(x, NamedSharding(mesh, spec))
            assert checksums({"x": placed}) == {"x": expected}


def test_sums_of_slices_add_up():
    x = RNG.integers(0, 2**32, 2 * HOST_CHUNK + 17, np.uint32).view(np.float32)
    parts = [host_sums(x[start : start + 999_983], start) for start in range(0, len(x), 999_983)]
    assert tuple(sum(part[number] for part in parts) % 2**32 for number in range(2)) == host_sums(x, 0)


@given(st.integers(0, X.size - 1), st.integers(0, 31))
def test_every_flipped_bit_changes_the_checksum(index, bit):
    changed = X.copy()
    changed.reshape(-1).view(np.uint32)[index] ^= np.uint32(1) << np.uint32(bit)
    assert host_sums(changed, 0)[0] != host_sums(X, 0)[0]


@given(st.permutations(range(4)))
def test_reordering_changes_the_checksum(order):
    assert (host_sums(X[list(order)], 0) == host_sums(X, 0)) == (list(order) == [0, 1, 2, 3])
