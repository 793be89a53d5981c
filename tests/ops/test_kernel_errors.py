"""The errors of kernels that do not compile name the setting that avoids them."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

from memsearcher_jax.ops.kernel_errors import KernelError, way_around_kernels


def test_an_error_of_the_kernel_compiler_names_the_setting():
    message = "INTERNAL: Mosaic failed to compile TPU kernel: Not implemented\nThe MLIR operation involved: ..."
    with pytest.raises(KernelError) as found, way_around_kernels("model.attention"):
        raise jax.errors.JaxRuntimeError(message)
    line = str(found.value)
    assert "set model.attention to xla" in line and "Mosaic failed to compile" in line and "\n" not in line


def test_other_errors_pass():
    with pytest.raises(jax.errors.JaxRuntimeError, match="HBM"), way_around_kernels("model.attention"):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: ... exceeds available HBM (15.75G)")


@pytest.mark.tpu_compile
def test_a_kernel_that_exceeds_the_memory_of_a_core_is_recognised(tpu_compiler):
    device = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
    x = jax.ShapeDtypeStruct((1 << 13, 1 << 13), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))

    def copy(x_ref, y_ref):
        y_ref[...] = x_ref[...]

    @jax.jit
    def call(x):
        params = pltpu.CompilerParams(vmem_limit_bytes=1 << 20)
        return pl.pallas_call(copy, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), compiler_params=params)(x)

    with pytest.raises(KernelError, match=r"sampling\.attention"), way_around_kernels("sampling.attention"):
        call.lower(x).compile()
